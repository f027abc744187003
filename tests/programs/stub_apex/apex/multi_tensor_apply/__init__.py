def multi_tensor_applier(op, buf, lists, *args):
    return op(2048 * 32, buf, lists, *args)
