"""MXNet: a convolutional network by the Module API, its optimizer on the kvstore.

Does what MXNet's example/image-classification/train_mnist.py and common/fit.py do.

python module_mxnet.py --model-prefix digits
python module_mxnet.py --model-prefix digits --load-epoch 4
python tools/launch.py -n 2 python module_mxnet.py --kv-store dist_sync
"""

import logging
import sys

import digits
import mxnet as mx

DEVICES = [mx.cpu(0), mx.cpu(1)]


def network():
    """The symbol to train."""
    net = mx.sym.Variable("data")
    net = mx.sym.Convolution(net, kernel=(3, 3), num_filter=8, name="conv1")
    net = mx.sym.Activation(net, act_type="tanh")
    net = mx.sym.Pooling(net, pool_type="max", kernel=(2, 2), stride=(2, 2))
    net = mx.sym.FullyConnected(mx.sym.Flatten(net), num_hidden=64, name="fc1")
    net = mx.sym.Activation(net, act_type="tanh")
    net = mx.sym.FullyConnected(net, num_hidden=10, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


class Batches(mx.io.DataIter):
    """The batches of one worker, in another order after each epoch."""

    def __init__(self, data, args, kv):
        """Begins with the first epoch to train."""
        super().__init__(args.batch_size)
        self.provide_data = [("data", (args.batch_size, 1, 8, 8))]
        self.provide_label = [("softmax_label", (args.batch_size,))]
        self.arguments = data, args, kv
        self.epoch = (args.load_epoch or 0) - 1
        self.reset()

    def reset(self):
        """Begins the next epoch."""
        self.epoch += 1
        self.batches = digits.batches(*self.arguments, self.epoch)

    def next(self):
        """The next batch."""
        images, labels = next(self.batches)
        return mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)])


def lr_schedule(args, kv):
    """The learning rate to begin with, and the scheduler that changes it, if any."""
    epochs = [int(epoch) for epoch in args.lr_step_epochs.split(",")]
    # Updates are counted from the epoch that the program begins with.
    begin = args.load_epoch or 0
    lr = args.lr * args.lr_factor ** sum(epoch <= begin for epoch in epochs)
    size = digits.epoch_size(args, kv)
    steps = [(epoch - begin) * size for epoch in epochs if epoch > begin]
    if not steps:
        return lr, None
    return lr, mx.lr_scheduler.MultiFactorScheduler(steps, args.lr_factor, base_lr=lr)


def load_model(args, kv):
    """A module and its first parameters, or one of a checkpoint, which has its own."""
    if args.load_epoch is not None:
        checkpoint = digits.prefix(args, kv), args.load_epoch, "dist" not in kv.type
        return mx.mod.Module.load(*checkpoint, context=DEVICES), None
    net = network()
    names = net.list_arguments()[1:-1]  # between the data and the labels
    shapes = net.infer_shape(data=(args.batch_size, 1, 8, 8))[0][1:-1]
    weights = map(mx.nd.array, digits.first_weights(shapes))
    return mx.mod.Module(net, context=DEVICES), {name: next(weights) for name in names}


def save_model(module, args, kv):
    """What writes a checkpoint after each epoch."""
    if args.model_prefix is None:
        return None
    return mx.callback.module_checkpoint(
        module, digits.prefix(args, kv), save_optimizer_states="dist" not in kv.type
    )


def fit(args):
    """Trains, and validates after each epoch."""
    kv = mx.kv.create(args.kv_store)
    if args.gc_type != "none":
        compression = {"type": args.gc_type, "threshold": args.gc_threshold}
        kv.set_gradient_compression(compression)
    head = f"Node[{kv.rank}] %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=head)
    train, validation = digits.load()
    module, parameters = load_model(args, kv)
    lr, scheduler = lr_schedule(args, kv)
    options = {"learning_rate": lr, "wd": args.wd, "lr_scheduler": scheduler}
    if args.optimizer in digits.WITH_MOMENTUM:
        options["momentum"] = args.mom
    module.fit(
        Batches(train, args, kv),
        # One batch: it would fill up a last one with images that count twice.
        eval_data=mx.io.NDArrayIter(*validation, len(validation[1])),
        eval_metric=["accuracy", "ce"],
        kvstore=kv,
        optimizer=args.optimizer,
        optimizer_params=options,
        arg_params=parameters,
        begin_epoch=args.load_epoch or 0,
        num_epoch=args.num_epochs,
        batch_end_callback=mx.callback.Speedometer(args.batch_size, args.disp_batches),
        epoch_end_callback=save_model(module, args, kv),
    )


fit(digits.fit_options(__doc__.splitlines()[0]))
