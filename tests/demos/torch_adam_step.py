"""resume with torch's AdamW"""

from trainers import megatron_training as mt

if __name__ == "__main__":
    mt.show_resume("torch", mt.build, steps=3, inner="torch", raises="KeyError: 'step'")
