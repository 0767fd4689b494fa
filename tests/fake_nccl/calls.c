// The exported calls that move data, and groups.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "fake_nccl.h"

const char* const kind_names[KINDS] = {"allReduce",     "reduce", "broadcast", "allGather",
                                       "reduceScatter", "send",   "recv"};

static _Thread_local struct {
  int depth;
  Operation* operations;
  size_t count, room;
  Status status;  // of the group's first refused call
} group;

static Status check(const Operation* op) {
  const char* name = kind_names[op->kind];
  const Comm* comm = op->comm;
  Status status = alive(comm, name);
  if (status != OK) return status;
  if (!type_bytes(op->type)) return error(INVALID_ARGUMENT, "%s: invalid type %d", name, op->type);
  if (op->root < 0 || op->root >= comm->size) {
    return error(INVALID_ARGUMENT, "%s: invalid rank %d of %d", name, op->root, comm->size);
  }
  const int own = op->op - BUILT_IN_OPS;
  if (op->op < 0 || own >= MAX_OPS || (own >= 0 && !comm->factors[own].used)) {
    return error(INVALID_ARGUMENT, "%s: unknown operation %d", name, op->op);
  }
  if (own >= 0 && comm->factors[own].type != op->type) {
    return error(INVALID_ARGUMENT, "%s: operation %d is for type %d, not %d", name, op->op,
                 comm->factors[own].type, op->type);
  }
  const bool reads = op->kind != RECV && (op->kind != BROADCAST || comm->rank == op->root);
  const bool writes = op->kind != SEND && (op->kind != REDUCE || comm->rank == op->root);
  if (op->count && ((reads && !op->send) || (writes && !op->recv))) {
    return error(INVALID_ARGUMENT, "%s: a buffer is NULL", name);
  }
  return OK;
}

static Status keep(const Operation* op) {
  if (group.count == group.room) {
    group.room = group.room ? 2 * group.room : 16;
    group.operations = realloc(group.operations, group.room * sizeof *group.operations);
    if (!group.operations) abort();
  }
  group.operations[group.count++] = *op;
  return OK;
}

/// The calls on a captured stream, which are kept for replays instead of being made.
static struct {
  const void* _Atomic stream;
  Operation operations[MAX_OPS];
  size_t count;
} graph;

/// NULL ends the capture.
EXPORT void fakeNcclCapture(const void* stream) {
  if (stream) graph.count = 0;
  atomic_store(&graph.stream, stream);
}

static Status capture(const Operation* op) {
  if (graph.count == MAX_OPS) return error(INVALID_USAGE, "a graph has %d calls at most", MAX_OPS);
  graph.operations[graph.count++] = *op;
  return OK;
}

/// Makes the captured calls, and waits for their end.
EXPORT Status fakeNcclReplay(void) {
  Operation operations[MAX_OPS];
  for (size_t i = 0; i < graph.count; ++i) {
    operations[i] = graph.operations[i];
    const Status status = alive(operations[i].comm, "replay");
    if (status != OK) return status;
  }
  return graph.count ? execute(operations, graph.count)
                     : error(INVALID_USAGE, "no call was captured");
}

/// Reports the operation's reads and writes to the recording device, if it is in this process.
static void report(const Operation* op, const void* stream) {
  typedef void (*Access)(const void*, const void*, size_t, int, const char*);
  static Access access;
  static atomic_bool looked;
  if (!atomic_load(&looked)) {
    *(void**)&access = dlsym(RTLD_DEFAULT, "recordingDeviceAccess");
    atomic_store(&looked, true);
  }
  if (!access || !op->count) return;
  const Comm* comm = op->comm;
  const size_t bytes = op->count * type_bytes(op->type), all = bytes * (size_t)comm->size;
  const bool root = comm->rank == op->root;
  const bool reads = op->kind != RECV && (op->kind != BROADCAST || root);
  const bool writes = op->kind != SEND && (op->kind != REDUCE || root);
  const char* name = kind_names[op->kind];
  if (reads) access(stream, op->send, op->kind == REDUCE_SCATTER ? all : bytes, 0, name);
  if (writes) access(stream, op->recv, op->kind == ALL_GATHER ? all : bytes, 1, name);
}

/// `reduction` is 0 for a call that reduces nothing. `root` is the peer of a send or receive, and 0
/// for a call without root.
static Status submit(Comm* comm, const void* stream, Kind kind, const void* send, void* recv,
                     size_t count, int type, int reduction, int root) {
  Operation op = {.comm = comm,
                  .kind = kind,
                  .send = send,
                  .recv = recv,
                  .count = count,
                  .type = type,
                  .op = reduction,
                  .root = root};
  const char* name = kind_names[op.kind];
  record(name, op.comm, stream, op.count, op.type, op.op, op.root);
  Status status = check(&op);
  if (status == OK) {
    const Fault struck = fault(name);
    status = struck.status;
    op.hang = struck.hang;
    op.polls = struck.polls;
    if (struck.skip) return OK;
  }
  if (status == OK && stream && stream == atomic_load(&graph.stream)) return capture(&op);
  if (status == OK) report(&op, stream);
  if (status == OK) status = group.depth ? keep(&op) : execute(&op, 1);
  if (status == OK || status == IN_PROGRESS) count_call(op.comm);
  if (group.depth && status != OK && group.status == OK) group.status = status;
  return status;
}

#define CALL(Name, ...) EXPORT Status Name(__VA_ARGS__, Comm* comm, const void* stream)

CALL(ncclAllReduce, const void* send, void* recv, size_t count, int type, int op) {
  return submit(comm, stream, ALL_REDUCE, send, recv, count, type, op, 0);
}

CALL(ncclReduce, const void* send, void* recv, size_t count, int type, int op, int root) {
  return submit(comm, stream, REDUCE, send, recv, count, type, op, root);
}

CALL(ncclBroadcast, const void* send, void* recv, size_t count, int type, int root) {
  return submit(comm, stream, BROADCAST, send, recv, count, type, 0, root);
}

CALL(ncclBcast, void* buffer, size_t count, int type, int root) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

CALL(ncclAllGather, const void* send, void* recv, size_t count, int type) {
  return submit(comm, stream, ALL_GATHER, send, recv, count, type, 0, 0);
}

CALL(ncclReduceScatter, const void* send, void* recv, size_t count, int type, int op) {
  return submit(comm, stream, REDUCE_SCATTER, send, recv, count, type, op, 0);
}

CALL(ncclSend, const void* send, size_t count, int type, int peer) {
  return submit(comm, stream, SEND, send, NULL, count, type, 0, peer);
}

CALL(ncclRecv, void* recv, size_t count, int type, int peer) {
  return submit(comm, stream, RECV, NULL, recv, count, type, 0, peer);
}

EXPORT Status ncclGroupStart(void) {
  record("groupStart", NULL, NULL, 0, -1, -1, -1);
  const Fault struck = fault("groupStart");
  if (struck.status == OK) ++group.depth;
  return struck.status;
}

EXPORT Status ncclGroupEnd(void) {
  record("groupEnd", NULL, NULL, 0, -1, -1, -1);
  if (!group.depth) return error(INVALID_USAGE, "groupEnd without groupStart");
  if (--group.depth) return OK;
  const Fault struck = fault("groupEnd");
  Status status = group.status != OK ? group.status : struck.status;
  Operation* operations = group.operations;
  const size_t count = group.count;
  group.operations = NULL;
  group.count = group.room = 0;
  group.status = OK;
  for (size_t i = 0; i < count; ++i) {
    if (struck.polls) operations[i].polls = struck.polls;
    if (struck.hang) operations[i].hang = true;
  }
  if (status == OK && count) status = execute(operations, count);
  free(operations);
  return status;
}
