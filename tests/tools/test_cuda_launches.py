"""How libtorchkv_cuda handles the CUDA runtime's results, with a fake runtime.

The kernels' objects, as compiled by nvcc, are linked with it. Nothing is launched: the
fake returns given results for launches and queries.
"""

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import pytest

import cuda_kernels

ROOT = Path(__file__).parents[2]

FAKE = """
int launch_status, attributes_status, last_error, num_launches, num_blocks;
int num_block_rows, most_blocks, most_block_rows;
int register_status, registered_flags, registered_device, device;

struct dim3 { unsigned x, y, z; };
int cudaLaunchKernel(const void* kernel, struct dim3 grid, struct dim3 block,
                     void** arguments, unsigned long shared, void* stream) {
  ++num_launches;
  num_blocks = grid.x;
  num_block_rows = grid.y;
  if (most_blocks < grid.x) most_blocks = grid.x;
  if (most_block_rows < grid.y) most_block_rows = grid.y;
  if (launch_status) last_error = launch_status;
  return launch_status;
}
int cudaFuncGetAttributes(void* attributes, const void* kernel) {
  if (attributes_status) last_error = attributes_status;
  return attributes_status;
}
int cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}
const char* cudaGetErrorString(int error) { return "an error of the fake"; }
int cudaGetDevice(int* result) { *result = device; return 0; }
int cudaSetDevice(int next) { device = next; return 0; }
int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  last_error = 704;  /* cudaErrorPeerAccessAlreadyEnabled */
  return 704;
}
int cudaHostRegister(void* data, unsigned long size, unsigned flags) {
  if (register_status) last_error = register_status;
  registered_flags = flags;
  registered_device = device;
  return register_status;
}
int cudaHostUnregister(void* data) {
  if (register_status) last_error = register_status;
  registered_device = -device;
  return register_status;
}
int cudaStreamIsCapturing(void* stream, int* status) { *status = 1; return 0; }
/* What nvcc's own code calls. */
void** __cudaRegisterFatBinary(void* binary) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
void __cudaRegisterFunction() {}
int __cudaGetKernel() { return 0; }
int __cudaLaunchKernel() { return 0; }
unsigned __cudaPopCallConfiguration() { return 0; }
"""


class Variant(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint8) for name in ("value", "stored", "rule", "count")]


class Launch(ctypes.Structure):
    _fields_ = [
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


class TopValue(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "residual", "state")]


class SelectTop(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_uint8),
        ("is_aligned", ctypes.c_bool),
        ("num_values", ctypes.c_uint32),
        ("num_elements", ctypes.c_int64),
        ("num_sent", ctypes.c_int64),
        ("values", TopValue * 8),
    ]


class SentValue(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "residual", "kept", "codes")),
        ("top", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
    ]


class Send(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_uint8),
        ("codec", ctypes.c_uint8),
        ("is_aligned", ctypes.c_bool),
        ("adds", ctypes.c_bool),
        ("packs", ctypes.c_bool),
        ("num_values", ctypes.c_uint32),
        ("threshold", ctypes.c_double),
        ("num_elements", ctypes.c_int64),
        ("values", SentValue * 8),
        ("sum", ctypes.c_void_p),
    ]


class ReceivedValue(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("is_dense", ctypes.c_bool)]


class Receive(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint8),
        ("codec", ctypes.c_uint8),
        ("is_aligned", ctypes.c_bool),
        ("adds", ctypes.c_bool),
        ("num_values", ctypes.c_uint32),
        ("threshold", ctypes.c_double),
        ("first", ctypes.c_int64),
        ("num_elements", ctypes.c_int64),
        ("values", ReceivedValue * 8),
        ("sum", ctypes.c_void_p),
    ]


class RowSums(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_uint8),
        ("is_aligned", ctypes.c_bool),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("sources", "offsets", "sums", "added_to")),
    ]


class RowSteps(ctypes.Structure):
    _fields_ = [
        ("gradients", RowSums),
        ("stored", ctypes.c_uint8),
        *((name, ctypes.c_void_p) for name in ("step", "rows", "memory", "master")),
        ("states", ctypes.c_void_p * 3),
    ]


FLOAT, HALF, BFLOAT16, DOUBLE, INT64 = 0, 1, 2, 3, 8  # Dtype
TWO_BIT, TOP_K = 2, 7  # Codec::Id


def function(*arguments):
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)


class Table(ctypes.Structure):
    """As kernels/cuda/params.h has it."""

    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("params_bytes", ctypes.c_uint32),
        ("launch_sum", function(Variant, Launch)),
        ("launch_rates", function(Launch)),
        ("launch_copy", function(Launch)),
        ("launch_select_top", function(SelectTop, ctypes.c_void_p)),
        ("launch_send", function(Send, ctypes.c_void_p)),
        ("launch_receive", function(Receive, ctypes.c_void_p)),
        ("launch_row_sums", function(RowSums, ctypes.c_void_p)),
        ("launch_row_steps", function(RowSteps, ctypes.c_void_p)),
        ("has_code", function(ctypes.POINTER(ctypes.c_bool))),
        (
            "is_capturing",
            function(ctypes.c_void_p, ctypes.POINTER(ctypes.c_bool)),
        ),
        ("enable_peer", function(ctypes.c_int, ctypes.c_int)),
        (
            "register_host",
            function(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64),
        ),
        ("unregister_host", function(ctypes.c_int, ctypes.c_void_p)),
    ]


class Fake:
    """The table, and the fake's variables as attributes."""

    def __init__(self, path):
        vars(self)["library"] = ctypes.CDLL(path)
        self.library.torchkv_cuda_table.restype = ctypes.POINTER(Table)
        vars(self)["table"] = self.library.torchkv_cuda_table().contents

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def __setattr__(self, name, value):
        ctypes.c_int.in_dll(self.library, name).value = value


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    objects = sorted(ROOT.glob("build/cuda-*/*.o"))

    def is_fresh(target):
        command = target.with_suffix(".command").read_text()
        return cuda_kernels.is_fresh(target, shlex.split(command))

    if not objects or not all(map(is_fresh, objects)):
        assert os.environ.get("TORCHKV_USE_CUDA") != "1"
        pytest.skip("the CUDA kernels were not compiled")
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.c").write_text(FAKE)
    fake = ["c++", "-w", "-x", "c", "-fPIC", "-c", str(folder / "fake.c")]
    subprocess.run([*fake, "-o", str(folder / "fake.o")], check=True)
    library = folder / "library.so"
    command = ["c++", "-shared", "-o", str(library), *map(str, objects)]
    subprocess.run([*command, str(folder / "fake.o"), "-Wl,--no-undefined"], check=True)
    return library


@pytest.fixture
def fake(library):
    fake = Fake(library)
    for name in (
        *("launch_status", "attributes_status", "last_error", "num_launches"),
        *("most_blocks", "most_block_rows"),
        *("register_status", "registered_flags", "registered_device", "device"),
    ):
        setattr(fake, name, 0)
    return fake


def launch(fake, kernel, size):
    if kernel in ("send", "send codes"):
        packs = kernel == "send codes"
        send = Send(FLOAT, TWO_BIT, packs=packs, num_elements=16 * 1024 + 1)
        return fake.table.launch_send(send, None)
    if kernel == "receive":
        # The first chunk has one of the elements.
        receive = Receive(FLOAT, TWO_BIT, first=1023, num_elements=15 * 1024 + 2)
        return fake.table.launch_receive(receive, None)
    if kernel == "rows":
        # 256 threads of 4 columns each, but for the last block.
        rows = RowSums(FLOAT, is_aligned=True, num_rows=129, num_columns=128)
        return fake.table.launch_row_sums(rows, None)
    if kernel == "steps of rows":
        rows = RowSums(FLOAT, is_aligned=True, num_rows=129, num_columns=128)
        rule = ctypes.create_string_buffer(1024)  # a RuleStep of zeros
        steps = RowSteps(rows, FLOAT, step=ctypes.addressof(rule))
        return fake.table.launch_row_steps(steps, None)
    params = (ctypes.c_uint32 * (size // 4))()
    params[0] = 1  # key
    params[1] = 17  # chunks
    call = Launch(ctypes.addressof(params), size)
    if kernel == "copy":
        return fake.table.launch_copy(call)
    if kernel == "rates":
        return fake.table.launch_rates(call)
    return fake.table.launch_sum(Variant(0, 0, 0, 2), call)


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        *(("copy", size) for size in (4096, 12288, 31744)),
        *(("rates", size) for size in (4096, 12288, 31744)),
        *(("sum", size) for size in (4096, 12288, 31744)),
        ("send", None),
        ("send codes", None),
        ("receive", None),
        ("rows", None),
        ("steps of rows", None),
    ],
)
def test_a_launch_is_judged_by_its_own_status(fake, kernel, size):
    fake.last_error = 9  # of other code, not yet queried
    assert launch(fake, kernel, size) == 0
    assert (fake.last_error, fake.num_launches, fake.num_blocks) == (9, 1, 17)
    fake.launch_status = 98
    assert launch(fake, kernel, size) == 98
    assert fake.last_error == 0, "it would look like one of the next call"


@pytest.mark.parametrize(
    ("value", "num_elements", "num_passes"),
    [
        (FLOAT, 16 * 1024 + 1, 3 + 2),
        (DOUBLE, 1, 6),
        (HALF, 2048, 3 + 1),
        (FLOAT, (1 << 20) + 1, 3 + 2),
    ],
)
def test_each_pass_of_topk_counts_and_chooses(fake, value, num_elements, num_passes):
    top = SelectTop(value, num_values=3, num_elements=num_elements, num_sent=1)
    fake.last_error = 9  # of other code, not yet queried
    assert fake.table.launch_select_top(top, None) == 0
    assert (fake.last_error, fake.num_launches) == (9, 2 * num_passes)
    # The last kernel has a block for each value, the one before a row of blocks.
    assert (fake.num_blocks, fake.num_block_rows) == (3, 1)
    chunks = -(-num_elements // 1024)
    assert (fake.most_blocks, fake.most_block_rows) == (max(3, min(chunks, 1024)), 3)
    fake.num_launches = 0
    fake.launch_status = 98
    assert fake.table.launch_select_top(top, None) == 98
    assert (fake.last_error, fake.num_launches) == (0, 1), "the others are not launched"


def test_what_has_no_kernel_is_not_launched(fake):
    params = (ctypes.c_uint32 * 1024)()
    call = Launch(ctypes.addressof(params), 4096)
    assert fake.table.launch_sum(Variant(0, 1, 0, 2), call) == 98
    no_codes = Send(FLOAT, TOP_K, packs=True, num_elements=1)
    assert fake.table.launch_send(no_codes, None) == 98
    assert fake.table.launch_select_top(SelectTop(INT64, num_elements=1), None) == 98
    assert fake.table.launch_row_sums(RowSums(9), None) == 1
    for value, stored in ((HALF, BFLOAT16), (FLOAT, DOUBLE), (INT64, INT64)):
        steps = RowSteps(RowSums(value), stored)
        assert fake.table.launch_row_steps(steps, None) == 98
    assert fake.table.launch_send(Send(INT64, TWO_BIT, num_elements=1), None) == 98
    for number, codec in ((HALF, TWO_BIT), (INT64, TWO_BIT), (FLOAT, TOP_K)):
        receive = Receive(number, codec, num_elements=1)
        assert fake.table.launch_receive(receive, None) == 98
    assert fake.num_launches == 0


@pytest.mark.parametrize(
    ("status", "error", "has_code"),
    [
        (0, 0, True),
        (209, 0, False),  # cudaErrorNoKernelImageForDevice
        (98, 0, False),  # cudaErrorInvalidDeviceFunction
        (222, 0, False),  # cudaErrorUnsupportedPtxVersion
        (2, 2, False),  # cudaErrorMemoryAllocation
    ],
)
def test_whether_a_device_has_code(fake, status, error, has_code):
    fake.attributes_status = status
    found = ctypes.c_bool()
    assert fake.table.has_code(found) == error
    assert found.value == has_code
    assert fake.last_error == 0


@pytest.mark.parametrize("status", [0, 712])  # cudaErrorHostMemoryAlreadyRegistered
def test_host_memory_is_registered_for_all_devices(fake, status):
    fake.register_status = status
    assert fake.table.register_host(3, 4096, 4096) == status
    assert fake.registered_flags == 1  # cudaHostRegisterPortable
    assert (fake.registered_device, fake.device) == (3, 0)
    assert fake.table.unregister_host(3, 4096) == status
    assert (fake.registered_device, fake.device) == (-3, 0)
    assert fake.last_error == 0


def test_questions(fake):
    captured = ctypes.c_bool()
    assert fake.table.is_capturing(None, captured) == 0
    assert captured.value
    assert fake.table.enable_peer(0, 1) == 0, "switched on already"
    assert fake.last_error == 0
    assert fake.table.params_bytes == 31744
