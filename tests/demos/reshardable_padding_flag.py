"""resume with the precision-aware optimizer"""

from functools import partial

from trainers import megatron_training as mt

if __name__ == "__main__":
    precision_aware = partial(mt.build, precision_aware=True)
    mt.show_resume(
        "dp_reshardable",
        precision_aware,
        steps=2,
        raises=("AttributeError: 'bool'", "KeyError: 'padding'"),
    )
