"""resume Muon, ZeRO 1 and 2, bf16"""

from trainers import optimizers

if __name__ == "__main__":
    optimizers.show_resume("Muon-1", "Muon-2", raises="RuntimeError: expected dtype float")
