"""Work pools of type `slurm`: a worker that submits each flow run with `sbatch` and follows its job."""
