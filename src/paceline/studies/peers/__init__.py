"""Other systems that Paceline is measured against: how each is installed, and what is there.

    recipes.py    versions, packages and build settings of each, as data
    install.py    a virtual environment each under the cache; whole, or not taken for installed
    listing.py    what is there, its versions and size, and what is missing

What they train is in `benchmarks/peers/`, which comes with the source tree.
"""
