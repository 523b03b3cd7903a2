"""How each peer is installed: versions, packages and build settings, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError, unknown_name

TORCH = "2.13.0"
"""Of every peer: what is compared is how it uses PyTorch, not which PyTorch it has."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's builds without CUDA, which are a tenth of the size."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something outside of Python that a peer needs."""

    name: str
    """A command on the PATH."""
    remedy: str
    """How to get it, as it goes on Debian."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """How a peer's source is compiled."""

    packages: tuple[str, ...]
    """What must be there before: pip shows the build what is installed, nothing else."""
    environment: Mapping[str, str]
    standard: str
    """Of C++, appended to every call of the compiler; PyTorch's headers refuse an older one."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One peer."""

    name: str
    title: str
    module: str
    """What a program imports."""
    package: str
    """What pip calls it."""
    version: str
    extras: str = ""
    with_packages: tuple[str, ...] = ()
    """Further ones that its program in benchmarks/peers needs, pinned."""
    loosened: tuple[str, ...] = ()
    """Packages of Paceline's own whose version the peer decides, because it refuses ours."""
    build: Build | None = None
    """None: it comes as a wheel."""
    programs: tuple[Program, ...] = ()
    minutes: float = 2.0
    """What an install took on 2 quiet cores, packages already downloaded."""

    @property
    def requirement(self) -> str:
        return f"{self.package}{self.extras}=={self.version}"


COMPILER = (
    Program(name="g++", remedy="apt-get install g++"),
    Program(name="cmake", remedy="apt-get install cmake"),
)
JAVA = Program(name="java", remedy="apt-get install openjdk-17-jre-headless")

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="horovod",
        title="Horovod over Gloo, built from source",
        module="horovod.torch",
        package="horovod",
        version="0.28.1",
        build=Build(
            packages=(
                "setuptools==81.0.0",
                "wheel==0.48.0",
                "packaging==26.3",
                "pyyaml==6.0.3",
                "cffi==2.1.1",
            ),
            environment={
                "HOROVOD_WITH_PYTORCH": "1",
                "HOROVOD_WITHOUT_TENSORFLOW": "1",
                "HOROVOD_WITHOUT_MXNET": "1",
                "HOROVOD_WITHOUT_MPI": "1",
                "HOROVOD_WITH_GLOO": "1",
            },
            standard="gnu++20",
        ),
        programs=COMPILER,
        minutes=9.0,
    ),
    Recipe(
        name="spark",
        title="Apache Spark's TorchDistributor",
        module="pyspark.ml.torch.distributor",
        package="pyspark",
        version="4.3.0",
        with_packages=("pandas==3.1.1", "pyarrow==26.0.1"),  # barrier tasks on a cluster need them
        programs=(JAVA,),
    ),
    Recipe(
        name="ray",
        title="Ray Train's TorchTrainer",
        module="ray.train.torch",
        package="ray",
        extras="[train]",
        version="2.60.0",
    ),
    Recipe(
        name="tensorflow",
        title="TensorFlow: MultiWorkerMirroredStrategy, ParameterServerStrategy",
        module="tensorflow",
        package="tensorflow-cpu",
        version="2.21.0",
    ),
    Recipe(
        name="accelerate",
        title="Hugging Face Accelerate",
        module="accelerate",
        package="accelerate",
        version="1.15.0",
        minutes=1.0,
    ),
    Recipe(
        name="lightning",
        title="PyTorch Lightning",
        module="lightning",
        package="lightning",
        version="2.6.6",
    ),
    Recipe(
        name="deepspeed",
        title="DeepSpeed on CPUs",
        module="deepspeed",
        package="deepspeed",
        version="0.19.8",
    ),
)


def names() -> tuple[str, ...]:
    """Of all peers that can be installed."""
    return tuple(each.name for each in RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of a peer."""
    for each in RECIPES:
        if each.name == name:
            return each
    raise ConfigError(unknown_name("peer", name, names()))
