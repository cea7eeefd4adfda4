"""From a problem and a machine profile to a decision, and the integers that kernels take."""
