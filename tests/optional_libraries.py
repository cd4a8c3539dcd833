"""Libraries that ``make test`` does not install. CI runs ``make test-all``, which has them all."""

LIBRARIES = {"accelerate", "IPython", "lightning", "mlflow", "tensorboard", "tensorboardX", "transformers", "wandb"}
