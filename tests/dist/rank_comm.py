"""One rank of test_comm.py: calls every verb and prints the results. `rank size store [cpu | cuda]`"""

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from inkcap.parallel.comm import Comm

torch.set_num_threads(1)
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank) if sys.argv[4:] == ["cuda"] else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
comm = Comm.join(dist.FileStore(store, size), rank, size, name="tp", device=device, timeout_seconds=60)
torch.set_default_device(device)
results = {}
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    x = (torch.arange(8).view(4, 2) * (rank + 1)).to(dtype)
    total = x.clone()
    kept = comm.all_reduce(total)
    results[str(dtype)] = {
        "all_reduce": kept.tolist(),
        "in_place": kept is total,
        "all_max": comm.all_max(x.clone()).tolist(),
        "reduce_scatter": [comm.reduce_scatter(x, dim).tolist() for dim in (0, 1)],
        "all_gather": [comm.all_gather(x, dim).tolist() for dim in (0, 1)],
        "all_gather_strided": comm.all_gather(x.t(), 0).tolist(),
        "all_to_all": comm.all_to_all(x, [1, 3] if rank == 0 else [2, 2], [1, 2] if rank == 0 else [3, 2]).tolist(),
    }
noise = torch.randn(1000, generator=torch.Generator(device).manual_seed(rank))
sums = [comm.all_reduce(noise.clone()) for _ in range(2)]
results["same_bits_again"] = torch.equal(*sums)
results["ordered"] = torch.equal(replace(comm, ordered=True).all_reduce(noise.clone()), sums[0])  # of two ranks
results["sum_bits"] = sums[0].view(torch.int32).sum().item()
results["slab_is_part_of_sum"] = torch.equal(comm.reduce_scatter(noise), sums[0].chunk(size)[rank])
if rank == 0:
    comm.send(torch.tensor([[1.0, 2.0]]).t(), to=1)
else:
    results["received"] = comm.recv(torch.empty(2, 1), source=0).tolist()
results["global_group"] = dist.is_initialized()
comm.close()
print(json.dumps(results))
