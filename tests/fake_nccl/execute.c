// Executes operations. A communicator's collectives run in order, then its sends and receives all
// together, so these may be in any order in a group. Several communicators of a thread run
// concurrently.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

/// Publishes this rank's signature, and compares those of all ranks.
static Status agree(Operation* op) {
  Comm* comm = op->comm;
  Line* lines = comm->shared->lines;
  const bool own_op = op->op >= BUILT_IN_OPS;
  const Factor* factor = own_op ? &comm->factors[op->op - BUILT_IN_OPS] : NULL;
  const double value = !own_op             ? 1
                       : factor->on_device ? load(op->type, factor->address)
                                           : factor->factor;
  lines[comm->rank].signature =
      (Signature){(int)op->kind, op->type, own_op ? PREMUL : op->op, op->root, op->count, value};
  Status status = barrier(comm);
  if (status != OK) return status;
  for (int rank = 1; rank < comm->size && status == OK; ++rank) {
    const Signature *a = &lines[0].signature, *b = &lines[rank].signature;
    if (a->kind != b->kind || a->type != b->type || a->op != b->op || a->root != b->root ||
        a->count != b->count) {
      status = error(INVALID_ARGUMENT,
                     "rank 0 calls %s(count %lu, type %d, op %d, root %d), rank %d %s(count %lu, "
                     "type %d, op %d, root %d)",
                     kind_names[a->kind], (unsigned long)a->count, a->type, a->op, a->root, rank,
                     kind_names[b->kind], (unsigned long)b->count, b->type, b->op, b->root);
    }
  }
  const Status met = barrier(comm);
  return status != OK ? status : met;
}

/// Reads the ranks' data into the result: `part` elements at `offset` of this block.
static void take(const Operation* op, int block, size_t offset, size_t part) {
  const Comm* comm = op->comm;
  const Line* lines = comm->shared->lines;
  const size_t width = type_bytes(op->type);
  unsigned char* out = op->recv + offset * width;
  const void* inputs[MAX_RANKS];
  double factors[MAX_RANKS];
  for (int rank = 0; rank < comm->size; ++rank) {
    inputs[rank] = lines[rank].data;
    factors[rank] = lines[rank].signature.factor;
  }
  switch (op->kind) {
    case BROADCAST:
      memmove(out, inputs[op->root], part * width);
      break;
    case ALL_GATHER:
      for (int rank = 0; rank < comm->size; ++rank) {
        memcpy(out + (size_t)rank * op->count * width, inputs[rank], part * width);
      }
      break;
    default: {
      const bool mine =
          op->kind == ALL_REDUCE || (op->kind == REDUCE ? op->root : block) == comm->rank;
      if (mine) reduce(out, comm->size, inputs, factors, part, op->type, lines[0].signature.op);
    }
  }
}

static Status collective(Operation* op) {
  Comm* comm = op->comm;
  const size_t width = type_bytes(op->type), whole = CHUNK / width;
  Status status = agree(op);
  const int blocks = op->kind == REDUCE_SCATTER ? comm->size : 1;
  for (int block = 0; block < blocks; ++block) {
    for (size_t offset = 0; status == OK && offset < op->count; offset += whole) {
      const size_t part = smaller(whole, op->count - offset);
      if (op->kind != BROADCAST || comm->rank == op->root) {
        const size_t from = (size_t)block * op->count + offset;
        memcpy(comm->shared->lines[comm->rank].data, op->send + from * width, part * width);
      }
      status = barrier(comm);
      if (status == OK) {
        take(op, block, offset, part);
        status = barrier(comm);
      }
    }
  }
  return status;
}

/// Moves a chunk, if there is one to receive or room to send one. A send ends when all of it was
/// received.
static Status progress(Operation* op, bool* moved) {
  Comm* comm = op->comm;
  const bool sends = op->kind == SEND;
  Channel* channel = sends ? &comm->shared->channels[comm->rank][op->root]
                           : &comm->shared->channels[op->root][comm->rank];
  const size_t bytes = op->count * type_bytes(op->type), part = smaller(CHUNK, bytes - op->offset);
  const bool all = op->chunk > 0 && op->offset == bytes;
  const bool full = atomic_load(&channel->written) > atomic_load(&channel->read);
  *moved = false;
  if (sends && atomic_exchange(&channel->refused, 0)) {
    return error(INVALID_ARGUMENT, "rank %d refused a send of %lu elements of type %d from rank %d",
                 op->root, (unsigned long)op->count, op->type, comm->rank);
  }
  if (sends ? full : !full) return OK;
  *moved = true;
  op->done = sends ? all : op->offset + part == bytes;
  if (sends && all) return OK;
  if (sends) {
    channel->count = op->count;
    channel->type = op->type;
    if (part) memcpy(channel->data, op->send + op->offset, part);
    atomic_fetch_add(&channel->written, 1);
  } else if (channel->count != op->count || channel->type != op->type) {
    error(INVALID_ARGUMENT,
          "rank %d expects %lu elements of type %d from rank %d, which sends %lu of type %d",
          comm->rank, (unsigned long)op->count, op->type, op->root, (unsigned long)channel->count,
          channel->type);
    atomic_store(&channel->refused, 1);
    atomic_fetch_add(&channel->read, 1);
    return INVALID_ARGUMENT;
  } else {
    if (part) memcpy(op->recv + op->offset, channel->data, part);
    atomic_fetch_add(&channel->read, 1);
  }
  op->offset += part;
  ++op->chunk;
  return OK;
}

/// Whether an earlier message of the same pair and direction is still in progress.
static bool waits(const Operation* operations, size_t index) {
  const Operation* op = &operations[index];
  for (size_t i = 0; i < index; ++i) {
    const Operation* before = &operations[i];
    if (!before->done && before->comm == op->comm && before->kind == op->kind &&
        before->root == op->root)
      return true;
  }
  return false;
}

static Status point_to_point(Comm* comm, Operation* operations, size_t count) {
  for (unsigned turn = 0;; ++turn) {
    bool pending = false;
    for (size_t i = 0; i < count; ++i) {
      Operation* op = &operations[i];
      if (op->comm != comm || op->kind < SEND || op->done) continue;
      pending = true;
      bool moved = false;
      const Status status = waits(operations, i) ? OK : progress(op, &moved);
      if (status != OK) return status;
      if (moved) turn = 0;
    }
    if (!pending) return OK;
    if (is_aborted(comm)) return error(INTERNAL_ERROR, "rank %d was aborted", comm->rank);
    rest(turn);
  }
}

typedef struct {
  Comm* comm;
  Operation* operations;
  size_t count;
  Status status;
} Share;

static void* run(void* argument) {
  Share* share = argument;
  Comm* comm = share->comm;
  int polls = 0;
  atomic_fetch_add(&comm->calls, 1);
  for (size_t i = 0; i < share->count && share->status == OK; ++i) {
    Operation* op = &share->operations[i];
    if (op->comm != comm) continue;
    polls = op->polls ? op->polls : polls;
    if (op->hang)
      share->status = hang(comm, kind_names[op->kind]);
    else if (op->kind < SEND)
      share->status = collective(op);
  }
  if (share->status == OK) share->status = point_to_point(comm, share->operations, share->count);
  if (share->status == OK && polls) {
    atomic_store(&comm->polls, polls);
    share->status = IN_PROGRESS;
  }
  atomic_fetch_sub(&comm->calls, 1);
  return NULL;
}

/// Counts a caller in each family, or with -1 takes it back. NCCL corrupts or hangs where two
/// threads call communicators that share resources.
static Status count_caller(Operation* operations, size_t count, int change) {
  Status status = OK;
  for (size_t i = 0; i < count; ++i) {
    Comm* comm = operations[i].comm;
    bool known = false;
    for (size_t j = 0; j < i; ++j) known = known || operations[j].comm->family == comm->family;
    if (known || !comm->shares) continue;
    if (atomic_fetch_add(&comm->family->busy, change) == 0 || change < 0) continue;
    status = error(INVALID_USAGE, "two threads call communicators that share resources");
  }
  return status;
}

static Status execute_alone(Operation* operations, size_t count) {
  Share* shares = calloc(count, sizeof *shares);
  pthread_t* threads = calloc(count, sizeof *threads);
  if (!shares || !threads) abort();
  size_t comms = 0;
  for (size_t i = 0; i < count; ++i) {
    size_t known = 0;
    while (known < comms && shares[known].comm != operations[i].comm) ++known;
    if (known == comms) shares[comms++] = (Share){operations[i].comm, operations, count, OK};
  }
  for (size_t i = 1; i < comms; ++i) {
    if (pthread_create(&threads[i], NULL, run, &shares[i]) != 0) abort();
  }
  if (comms) run(&shares[0]);
  Status status = comms ? shares[0].status : OK;
  for (size_t i = 1; i < comms; ++i) {
    pthread_join(threads[i], NULL);
    if (status == OK) status = shares[i].status;
  }
  free(shares);
  free(threads);
  return status;
}

Status execute(Operation* operations, size_t count) {
  Status status = count_caller(operations, count, 1);
  if (status == OK) status = execute_alone(operations, count);
  count_caller(operations, count, -1);
  return status;
}
