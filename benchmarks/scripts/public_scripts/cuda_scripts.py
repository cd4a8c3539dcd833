"""Public scripts that say CUDA where no GPU is: ``.cuda()``, ``device="cuda"``, NCCL, autocast and GradScaler for CUDA."""

from __future__ import annotations

from benchmarks.scripts.public_scripts import data
from benchmarks.scripts.public_scripts.scripts import Script

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
"""What torchrun sets for one process."""

SCRIPTS = [
    Script(
        "juho-lee/set_transformer",
        "run.py",
        "--num_steps 40 --B 4 --N_min 30 --N_max 60 --num_bench 5 --test_freq 20",
    ),
    Script(
        "locuslab/TCN",
        "TCN/adding_problem/add_test.py",
        "--epochs 1 --batch_size 1000 --seq_len 20 --levels 4 --log-interval 10",
        folder="",
        variables={"PYTHONPATH": "."},
        leave_out="TCN/*/data/*",
    ),
    Script(
        "DeepGraphLearning/KnowledgeGraphEmbedding",
        "codes/run.py",
        "--cuda --do_train --do_valid --data_path triples --model RotatE -n 16 -b 64 -d 32 -adv -lr 0.01 -de -cpu 2 --max_steps 40 "
        "--log_steps 10 -save models",
        folder="",
        data=data.knowledge_graph,
        leave_out="data/*",
    ),
    Script(
        "dragen1860/MAML-Pytorch",
        "omniglot_train.py",
        "--epoch 20 --task_num 4 --n_way 2 --k_qry 2 --update_step_test 1",
        data=data.characters,
    ),
    Script(
        "zhouhaoyi/Informer2020",
        "main_informer.py",
        "--model informer --data ETTh1 --use_amp --itr 1 --train_epochs 1 --batch_size 512 --seq_len 24 --label_len 12 --pred_len 12 "
        "--d_model 32 --n_heads 4 --d_ff 64",
        data=data.hourly_series,
    ),
    Script(
        "XinJingHao/TD3-Pytorch", "main.py", "--Max_train_steps 450 --batch_size 64 --net_width 32", leave_out="*.zip"
    ),
    Script(
        "facebookresearch/barlowtwins",
        "main.py",
        "images --workers 1 --epochs 1 --batch-size 4 --projector 64-64 --print-freq 1 "
        "--checkpoint-dir checkpoint/{run}",
        data=data.few_image_folders,
    ),
    Script(
        "facebookresearch/vicreg",
        "main_vicreg.py",
        "--data-dir images --arch resnet34 --mlp 64-64 --epochs 1 --batch-size 4 --num-workers 1 --log-freq-time 0 "
        "--exp-dir exp/{run}",
        data=data.few_image_folders,
        variables=ONE_PROCESS,
    ),
    Script(
        "akamaster/pytorch_resnet_cifar10",
        "trainer.py",
        "--arch resnet20 --epochs 1 -b 32 -j 1 -p 1",
        leave_out="pretrained_models/*",
    ),
    Script(
        "HobbitLong/SupContrast",
        "main_supcon.py",
        "--model resnet18 --epochs 1 --batch_size 32 --num_workers 1 --print_freq 1",
        variables={
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"
        },  # tensorboard_logger has generated code of an old protobuf
    ),
    Script(
        "sthalles/SimCLR",
        "run.py",
        "-dataset-name cifar10 --fp16-precision --epochs 1 -b 32 -j 1 --seed 0 --log-every-n-steps 1",
    ),
    Script(
        "salesforce/awd-lstm-lm",
        "main.py",
        "--data data/penn --batch_size 10 --bptt 20 --emsize 32 --nhid 32 --nlayers 2 --epochs 1 --log-interval 5",
        data=data.penn_treebank,
        variables={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # it loads a pickled model, as torch allowed until 2.5
    ),
    Script(
        "lucidrains/vector-quantize-pytorch",
        "examples/autoencoder.py",
        "--train_iter 30 --batch_size 32",
        folder="",
        variables={"PYTHONPATH": "."},
    ),
]
