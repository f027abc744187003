"""save without naming a format"""

from trainers import megatron_training as mt

if __name__ == "__main__":
    mt.show_resume("default", mt.build, steps=3, raises="CheckpointingException: ShardedTensor.flattened_range")
