"""The public names of MXNet 1.9.1, with the parameters of what is called.

``python mxnet_members.py``, run by MXNet's own Python, prints MEMBERS. What is before a
name is what docs/from_mxnet.md calls its owner.
"""

import inspect

MEMBERS = """\
gluon.Trainer(params, optimizer, optimizer_params, kvstore, compression_params, \
update_on_kvstore)
gluon.utils.check_sha1(filename, sha1_hash)
gluon.utils.clip_global_norm(arrays, max_norm, check_isfinite)
gluon.utils.download(url, path, overwrite, sha1_hash, retries, verify_ssl)
gluon.utils.replace_file(src, dst)
gluon.utils.split_and_load(data, ctx_list, batch_axis, even_split)
gluon.utils.split_data(data, num_slice, batch_axis, even_split)
kv._barrier()
kv._send_command_to_servers(head, body)
kv._set_updater(updater)
kv.broadcast(key, value, out, priority)
kv.init(key, value)
kv.is_capable(capability)
kv.load_optimizer_states(fname)
kv.num_workers
kv.pull(key, out, priority, ignore_sparse)
kv.push(key, value, priority)
kv.pushpull(key, value, out, priority)
kv.rank
kv.row_sparse_pull(key, out, priority, row_ids)
kv.save_optimizer_states(fname, dump_optimizer)
kv.set_gradient_compression(compression_params)
kv.set_optimizer(optimizer)
kv.type
mx.kv.KVStore
mx.kv.KVStoreBase
mx.kv.KVStoreBase.OPTIMIZER
mx.kv.KVStoreBase.kv_registry
mx.kv.KVStoreBase.register(klass)
mx.kv.KVStoreServer
mx.kv.create(name)
mx.lr_scheduler.CosineScheduler
mx.lr_scheduler.FactorScheduler
mx.lr_scheduler.LRScheduler
mx.lr_scheduler.MultiFactorScheduler
mx.lr_scheduler.PolyScheduler
mx.optimizer.AdaDelta
mx.optimizer.AdaGrad
mx.optimizer.Adam
mx.optimizer.Adamax
mx.optimizer.DCASGD
mx.optimizer.FTML
mx.optimizer.Ftrl
mx.optimizer.LAMB
mx.optimizer.LARS
mx.optimizer.LBSGD
mx.optimizer.NAG
mx.optimizer.Nadam
mx.optimizer.Optimizer
mx.optimizer.RMSProp
mx.optimizer.SGD
mx.optimizer.SGLD
mx.optimizer.Signum
mx.optimizer.Test
mx.optimizer.Updater
mx.optimizer.ccSGD
mx.optimizer.create(name)
mx.optimizer.get_updater(optimizer)
mx.optimizer.register(klass)
opt.aggregate_num
opt.allow_np_array
opt.begin_num_update
opt.clip_gradient
opt.create_optimizer(name)
opt.create_state(index, weight)
opt.create_state_multi_precision(index, weight)
opt.idx2name
opt.lazy_update
opt.learning_rate
opt.lr
opt.lr_mult
opt.lr_scheduler
opt.momentum
opt.multi_precision
opt.num_update
opt.opt_registry
opt.param_dict
opt.register(klass)
opt.rescale_grad
opt.set_learning_rate(lr)
opt.set_lr_mult(args_lr_mult)
opt.set_lr_scale(args_lrscale)
opt.set_wd_mult(args_wd_mult)
opt.sym_info
opt.update(index, weight, grad, state)
opt.update_multi_precision(index, weight, grad, state)
opt.wd
opt.wd_mult
p.cast(dtype)
p.data(ctx)
p.dtype
p.grad(ctx)
p.grad_req
p.init
p.initialize(init, ctx, default_init, force_reinit)
p.list_ctx()
p.list_data()
p.list_grad()
p.list_row_sparse_data(row_id)
p.lr_mult
p.name
p.reset_ctx(ctx)
p.row_sparse_data(row_id)
p.set_data(data)
p.shape
p.var()
p.wd_mult
p.zero_grad()
scheduler.base_lr
scheduler.get_warmup_lr(num_update)
scheduler.warmup_begin_lr
scheduler.warmup_final_lr
scheduler.warmup_mode
scheduler.warmup_steps
trainer.allreduce_grads()
trainer.learning_rate
trainer.load_states(fname)
trainer.optimizer
trainer.save_states(fname)
trainer.set_learning_rate(lr)
trainer.step(batch_size, ignore_stale_grad)
trainer.update(batch_size, ignore_stale_grad)
updater.get_states(dump_optimizer)
updater.set_states(states)
updater.sync_state_context(state, context)
""".splitlines()

# Read by the library and by tools/launch.py; those of others, such as HDFS, left out.
VARIABLES = """
DMLC_INTERFACE DMLC_NUM_SERVER DMLC_NUM_WORKER DMLC_PS_ROOT_PORT DMLC_PS_ROOT_URI
DMLC_PS_VAN_TYPE DMLC_ROLE MXNET_ENABLE_GPU_P2P MXNET_KVSTORE_BIGARRAY_BOUND
MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE MXNET_KVSTORE_LOGTREE
MXNET_KVSTORE_REDUCTION_NTHREADS MXNET_KVSTORE_SERIAL_PUSH MXNET_KVSTORE_SLICE_THRESHOLD
MXNET_KVSTORE_USETREE MXNET_UPDATE_ON_KVSTORE PS_DROP_MSG PS_HEARTBEAT_INTERVAL
PS_HEARTBEAT_TIMEOUT PS_RESEND PS_RESEND_TIMEOUT PS_VERBOSE
""".split()


def shown(name, value):
    if not inspect.isroutine(value):
        return name
    parameters = inspect.signature(value).parameters.values()
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    names = [p.name for p in parameters if p.name != "self" and p.kind not in kinds]
    return f"{name}({', '.join(names)})"


def own(module):
    """What is defined in a module or a package."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith(module.__name__)
    ]


def members():
    import mxnet as mx

    private = ["_barrier", "_send_command_to_servers", "_set_updater"]
    of_store = [n for n in vars(mx.kv.KVStore) if not n.startswith("_")] + private
    owners = {
        "kv": (mx.kv.KVStore, of_store),
        "mx.kv": (mx.kv, own(mx.kv)),
        "mx.kv.KVStoreBase": (
            mx.kv.KVStoreBase,
            vars(mx.kv.KVStoreBase).keys() - {*of_store},
        ),
        "trainer": (mx.gluon.Trainer, dir(mx.gluon.Trainer)),
        "p": (mx.gluon.Parameter("p"), dir(mx.gluon.Parameter("p"))),
        "gluon.utils": (mx.gluon.utils, mx.gluon.utils.__all__),
        "opt": (mx.optimizer.SGD(), dir(mx.optimizer.SGD())),
        "updater": (mx.optimizer.Updater, dir(mx.optimizer.Updater)),
        "mx.optimizer": (mx.optimizer, own(mx.optimizer)),
        "mx.lr_scheduler": (mx.lr_scheduler, own(mx.lr_scheduler)),
        "scheduler": (
            mx.lr_scheduler.LRScheduler(),
            dir(mx.lr_scheduler.LRScheduler()),
        ),
    }
    found = [shown("gluon.Trainer", mx.gluon.Trainer.__init__)]
    for name, (owner, names) in owners.items():
        for member in {*names}:
            if member in private or not member.startswith("_"):
                found.append(shown(f"{name}.{member}", getattr(owner, member)))
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(members()))
