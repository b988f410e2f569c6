"What ties the package to transformers, Accelerate, DeepSpeed and torch: plain modules, no lessons."
