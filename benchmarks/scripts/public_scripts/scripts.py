"""The public scripts of docs/public-scripts.md: where each one is, and the arguments with which it ends within seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.scripts.public_scripts import data

COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "milesial/Pytorch-UNet": "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "graykode/nlp-tutorial": "d05e31ec81d56d70c1db89b99ab07e948f7ebc11",
    "MorvanZhou/PyTorch-Tutorial": "dbe154a9e56635e51c6b0c2ccea8ae36cfb585a7",
    "hunkim/PyTorchZeroToAll": "e5a260fac0b4ff1e2ec434fc6f0d962ac97fc289",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "juho-lee/set_transformer": "73432c640ac78140496d6738416c54d32c686d65",
    "locuslab/TCN": "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
    "DeepGraphLearning/KnowledgeGraphEmbedding": "2e440e0f9c687314d5ff67ead68ce985dc446e3a",
    "dragen1860/MAML-Pytorch": "98a00d41724c133bd29619a2fb2cc46dd128a368",
    "zhouhaoyi/Informer2020": "29f2a739226a509202a092b464163da81fa74960",
    "XinJingHao/TD3-Pytorch": "4fb9452ce1fdece65fd0f7538f2d480e07dd5a1c",
    "facebookresearch/barlowtwins": "8e8d284ca0bc02f88b92328e53f9b901e86b4a3c",
    "facebookresearch/vicreg": "4e12602fd495af83efd1631fbe82523e6db092e0",
    "akamaster/pytorch_resnet_cifar10": "d5489e8995e81e91ce6b1d69dcc98ad579b0b153",
    "HobbitLong/SupContrast": "66a8fe53880d6a1084b2e4e0db0a019024d6d41a",
    "sthalles/SimCLR": "1848fc934ad844ae630e6c452300433fe99acfd9",
    "salesforce/awd-lstm-lm": "1d466ec5875675ca6b6f0caacbb741240a29da9e",
    "lucidrains/vector-quantize-pytorch": "0d7d1aa83334b6f2f8a40306bece75cdaa13d065",
    "keras-team/keras": "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60",
    "philipperemy/keras-tcn": "7576256b8b2a138b88ae2483b8616681686e424f",
    "PaddlePaddle/PaddleRec": "656326adf3c4117c11ec0eff5e8f61acd8191c2a",
    "PaddlePaddle/models": "8042c21b690ffc0162095e749a41b94dd38732da",
}


class Script(NamedTuple):
    """One script and how to run it."""

    repository: str
    file: str
    """Relative to the repository; the script runs in its folder unless ``folder`` says otherwise."""
    arguments: str = ""
    folder: str | None = None
    data: Callable[[Path], None] = data.none
    """Writes the files that the script reads, given the folder that it runs in."""
    prepare: str = ""
    """A file of the repository that is run first, with the same Python, relative to the folder."""
    variables: Mapping[str, str] = {}
    leave_out: str = "*.gif"
    """Files of the repository to leave out: large ones that are not read, or that ``data`` replaces."""

    @property
    def commit(self) -> str:
        """Return the commit that the script is taken from."""
        return COMMITS[self.repository]

    @property
    def where(self) -> str:
        """Return the folder that the script runs in, relative to the repository."""
        return str(Path(self.file).parent) if self.folder is None else self.folder

    @property
    def name(self) -> str:
        """Return a unique name."""
        return f"{self.repository} {self.file} {self.arguments}".strip()


EXAMPLES, GAN, TUTORIAL = "pytorch/examples", "eriklindernoren/PyTorch-GAN", "yunjey/pytorch-tutorial"
LIGHTNING, NLP, MORVAN = "Lightning-AI/pytorch-lightning", "graykode/nlp-tutorial", "MorvanZhou/PyTorch-Tutorial"
ZERO, CLEANRL = "hunkim/PyTorchZeroToAll", "vwxyzjn/cleanrl"
FEW_WORDS = "--emsize 32 --nhid 32 --epochs 2 --batch_size 10 --bptt 20"
FEW_IMAGES = "--n_epochs 4 --batch_size 32 --n_cpu 0"
GPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --eval_interval=20 --log_interval=5 --block_size=32 "
    "--batch_size=8 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=60 --lr_decay_iters=60 --dropout=0.0"
)

SCRIPTS = [
    Script(EXAMPLES, "mnist/main.py", "--epochs 2 --batch-size 32 --no-accel"),
    Script(EXAMPLES, "vae/main.py", "--epochs 3 --batch-size 32"),
    Script(EXAMPLES, "mnist_rnn/main.py", "--epochs 2 --batch-size 32"),
    Script(
        EXAMPLES,
        "siamese_network/main.py",
        "--epochs 1 --batch-size 16 --test-batch-size 16",
        variables={"PUBLIC_SCRIPTS_IMAGES": "96,40"},
    ),
    Script(EXAMPLES, "mnist_forward_forward/main.py", "--epochs 20 --train_size 200 --test_size 50"),
    Script(
        EXAMPLES,
        "word_language_model/main.py",
        f"--model LSTM {FEW_WORDS}",
        data=data.corpus,
        leave_out="*/wikitext-2/*",
    ),
    Script(
        EXAMPLES,
        "word_language_model/main.py",
        f"--model Transformer --lr 5 {FEW_WORDS}",
        data=data.corpus,
        leave_out="*/wikitext-2/*",
    ),
    Script(EXAMPLES, "regression/main.py"),
    Script(
        EXAMPLES,
        "dcgan/main.py",
        "--dataset mnist --dataroot . --batchSize 16 --imageSize 64 --ngf 8 --ndf 8 --niter 1 --workers 0 --manualSeed 1",
    ),
    Script(
        EXAMPLES,
        "super_resolution/main.py",
        "--upscale_factor 3 --batchSize 4 --nEpochs 2 --threads 0",
        data=data.super_resolution,
    ),
    Script("karpathy/nanoGPT", "train.py", GPT, data=data.shakespeare, prepare="data/shakespeare_char/prepare.py"),
    Script("karpathy/makemore", "makemore.py", "--max-steps 60 --n-layer 2 --n-embd 32 --num-workers 0"),
    Script("karpathy/makemore", "makemore.py", "--type gru --max-steps 60 --n-embd 32 --num-workers 0"),
    Script(
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "--trainer.max_iters=60 --trainer.num_workers=0",
        folder="",
        variables={"PYTHONPATH": "."},
    ),
    Script(
        "milesial/Pytorch-UNet",
        "train.py",
        "--epochs 2 --batch-size 4 --scale 0.25",
        data=data.segmentation,
        variables={"WANDB_MODE": "disabled"},
    ),
    Script("tkipf/pygcn", "pygcn/train.py", "--epochs 60", data=data.citations, variables={"PYTHONPATH": ".."}),
    Script(GAN, "implementations/gan/gan.py", FEW_IMAGES),
    Script(GAN, "implementations/wgan_gp/wgan_gp.py", FEW_IMAGES),
    Script(GAN, "implementations/acgan/acgan.py", "--n_epochs 1 --batch_size 16 --n_cpu 0"),
    Script(GAN, "implementations/aae/aae.py", FEW_IMAGES),
    Script(TUTORIAL, "tutorials/01-basics/linear_regression/main.py"),
    Script(TUTORIAL, "tutorials/01-basics/feedforward_neural_network/main.py"),
    Script(TUTORIAL, "tutorials/02-intermediate/convolutional_neural_network/main.py"),
    Script(
        TUTORIAL,
        "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py",
        variables={"PUBLIC_SCRIPTS_IMAGES": "1000,100"},
    ),
    Script(TUTORIAL, "tutorials/03-advanced/variational_autoencoder/main.py"),
    Script(LIGHTNING, "examples/fabric/image_classifier/train_torch.py", "--epochs 2 --batch-size 32"),
    Script(LIGHTNING, "examples/fabric/image_classifier/train_fabric.py", "--epochs 2 --batch-size 32"),
    Script(LIGHTNING, "examples/pytorch/bug_report/bug_report_model.py"),
    Script(NLP, "3-2.TextLSTM/TextLSTM.py"),
    Script(NLP, "5-1.Transformer/Transformer.py"),
    Script(MORVAN, "tutorial-contents/302_classification.py", leave_out="*/mnist/*"),
    Script(MORVAN, "tutorial-contents/306_optimizer.py", leave_out="*/mnist/*"),
    Script(MORVAN, "tutorial-contents/403_RNN_regressor.py", leave_out="*/mnist/*"),
    Script(ZERO, "07_diabets_logistic.py"),
    Script(ZERO, "12_4_hello_rnn_emb.py"),
    Script(CLEANRL, "cleanrl/ppo.py", "--total-timesteps 1024 --no-cuda", folder="", variables={"PYTHONPATH": "."}),
    Script(
        CLEANRL,
        "cleanrl/dqn.py",
        "--total-timesteps 1500 --learning-starts 300 --buffer-size 1000 --no-cuda",
        folder="",
        variables={"PYTHONPATH": "."},
    ),
    Script(
        CLEANRL,
        "cleanrl/c51.py",
        "--total-timesteps 1500 --learning-starts 300 --buffer-size 1000 --no-cuda",
        folder="",
        variables={"PYTHONPATH": "."},
    ),
    Script(
        "huggingface/pytorch-image-models",
        "train.py",
        "images --model resnet18 --img-size 32 --num-classes 2 --epochs 1 -b 8 --workers 1 --device cpu --input-size 3 32 32",
        data=data.image_folders,
    ),
]
