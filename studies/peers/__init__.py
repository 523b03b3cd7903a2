"""Other systems that Paceline is measured against: how each is installed, and what is there.

    recipes.py    versions, packages and build settings of each, as data
    install.py    a virtual environment each under the cache, PyTorch first, by pip alone
    environments.py   what is there, whole or not, its versions and size, and what is missing

What they train is in `benchmarks/peers/`.
"""
