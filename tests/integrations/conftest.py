"""What of this folder is no module of tests."""

collect_ignore = ["ray_killed.py"]  # a script, which test_ray.py runs in a process of its own
