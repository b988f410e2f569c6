"What ties the trainers to transformers, Accelerate and DeepSpeed: plain modules, no lessons."
