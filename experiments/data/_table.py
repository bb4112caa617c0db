"""The files of the named sets: where they belong, what they contain, where they come from.

Digests of gzip-compressed files are those of the uncompressed content; those of MNIST belong to
the files with the well-known MD5 sums.
"""

from __future__ import annotations

from experiments.data.files import File

__all__ = ["CIFAR10", "CIFAR10_ZIPS", "CLINC150", "IDX", "OMNIGLOT", "SST2", "UCI"]

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "notmnist": (f"{GITHUB}/davidflanagan/notMNIST-to-MNIST/17823f4d4a3acd8317c07866702d2eb2ac79c7a0"),
    "sst2": (f"{GITHUB}/clairett/pytorch-sentiment-classification/457ffd83de90a9d6d472d8ffc31bbffe40a8b236/data/SST2"),
    "clinc150": f"{GITHUB}/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data",
}


def _idx(name: str, part: str, images: str, labels: str) -> tuple[File, File]:
    def file(kind: str, digest: str) -> File:
        stem = f"{part}-{kind}"
        return File(f"{name}/{stem}", f"sha256:{digest}", f"{SOURCES[name]}/{stem}.gz", gz=True)

    return file(IMAGES, images), file(LABELS, labels)


def _sst2(part: str, digest: str) -> File:
    return File(f"text/sst2_{part}.tsv", f"sha256:{digest}", f"{SOURCES['sst2']}/{part}.tsv", gz=True)


IDX = {
    ("mnist", "train"): _idx(
        "mnist",
        "train",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    ("mnist", "test"): _idx(
        "mnist",
        "t10k",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    ("fashion-mnist", "train"): _idx(
        "fashion-mnist",
        "train",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    ("fashion-mnist", "test"): _idx(
        "fashion-mnist",
        "t10k",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    ("notmnist", "test"): _idx(
        "notmnist",
        "t10k",
        "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
        "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
    ),
}

OMNIGLOT = File(
    "omniglot/omniglot_small1_28x28.npz",
    "sha256:d78c87dad766637db4d08c465abe7aa945f7cbeadd8b355e5520bc1e209f8b8b",
)

CIFAR10 = File(
    "cifar10/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)

CIFAR10_ZIPS = {
    name: File(f"cifar10/{name}.zip", f"sha256:{digest}")
    for name, digest in {
        "test_batch": "71c6e0780cf8e7fe29c59cb59e9fe95e2bf21878ff2f97bb596093d74e8bc106",
        "data_batch_1": "b91bb545a78d891015775489530e51055f3950e90e14907283736db1a4282672",
        "data_batch_2": "2318a3ce5a639c19d18b441c69c07256b699de04a1ccf3acaebbb678415fee43",
        "data_batch_3": "010693318b87aca0f32bc5c96d8cf488a4179d8a5ef6266481f54c6c1cdc4b72",
        "data_batch_4": "cbb3dde98b8b35168a6944b9fe8349482cafac2705d0aec9cc3d6b911e0a62c1",
        "data_batch_5": "24dc91e703fe6ac7caeef230b38dca780ea7ded7165cdd7287e3ffc682e7775b",
    }.items()
}

UCI = {
    name: File(f"uci/{name}.npz", f"sha256:{digest}")
    for name, digest in {
        "bostonHousing": "c9c7bfb488f2983cf4c15a592910fb6906b8047a7707a7e55e52e249f3634a4e",
        "energy": "873e1ee2d2d6a414f48aaa764712692d4ec1eebeba7a56410e570592ac1968ab",
        "wine-quality-red": "78ca1763a5d7b83feeffe6ed8a57d2a7dd4e1ec56543c0fecdb3864f9bb6de9d",
        "yacht": "5e087dd6363ae4dd393c6c257b067ff9f1e0f456610c62266b00d61879b83ba0",
        "power-plant": "465be96787a661a2c73b41bc5d574d7dda4d9de98042cb95be080b88b3d0fb18",
        "naval-propulsion-plant": ("51196811b20c6f118c340e97bf0a86f728ddb7b38887caf2a17b1b268127ca5b"),
        "protein-tertiary-structure": ("28e8f014a3f8c31b585bb6b5ae57911e9a10ec712e04c7f8057e4584ab615660"),
    }.items()
}

SST2 = {
    "train": _sst2("train", "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"),
    "val": _sst2("dev", "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359"),
    "test": _sst2("test", "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"),
}

CLINC150 = File(
    "text/clinc150_data_full.json",
    "sha256:36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
    f"{SOURCES['clinc150']}/data_full.json",
    gz=True,
)
