// Exported functions: memory, registrations, and the memory that communicators have.
#include <stdlib.h>

#include "fake_nccl.h"

EXPORT Status ncclMemAlloc(void** address, size_t bytes) {
  record("memAlloc", NULL, NULL, bytes, -1, -1, -1);
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *address ? OK : error(SYSTEM_ERROR, "no memory of %lu bytes", (unsigned long)bytes);
}

EXPORT Status ncclMemFree(void* address) {
  record("memFree", NULL, NULL, 0, -1, -1, -1);
  free(address);
  return OK;
}

EXPORT Status ncclCommRegister(Comm* comm, void* address, size_t bytes, void** handle) {
  record("register", comm, NULL, bytes, -1, -1, -1);
  Status status = alive(comm, "register");
  if (status == OK) status = fault("register").status;
  if (status != OK) return status;
  *handle = malloc(1);
  return address && *handle ? OK : error(INVALID_ARGUMENT, "register: no address");
}

EXPORT Status ncclCommDeregister(Comm* comm, void* handle) {
  record("deregister", comm, NULL, 0, -1, -1, -1);
  if (!handle) return error(INVALID_ARGUMENT, "deregister: no handle");
  Status status = alive(comm, "deregister");
  if (status == OK) status = fault("deregister").status;
  if (status == OK) free(handle);
  return status;
}

/// All ranks call it.
EXPORT Status ncclCommWindowRegister(Comm* comm, void* address, size_t bytes, void** window,
                                     int flags) {
  record("windowRegister", comm, NULL, bytes, -1, -1, flags);
  Status status = alive(comm, "windowRegister");
  if (status == OK && (uintptr_t)address % 4096 != 0) {
    status = error(INVALID_ARGUMENT, "windowRegister: %p is no multiple of 4096", address);
  }
  if (status == OK) {
    atomic_fetch_add(&comm->calls, 1);
    status = barrier(comm);
    atomic_fetch_sub(&comm->calls, 1);
  }
  if (status == OK) *window = malloc(1);
  return status;
}

EXPORT Status ncclCommWindowDeregister(Comm* comm, void* window) {
  record("windowDeregister", comm, NULL, 0, -1, -1, -1);
  free(window);
  return alive(comm, "windowDeregister");
}

/// Like NCCL, it counts the memory of the whole family.
EXPORT Status ncclCommMemStats(Comm* comm, int stat, uint64_t* value) {
  Status status = alive(comm, "memStats");
  if (status == OK && stat != 3) status = error(INVALID_ARGUMENT, "memStats: statistic %d", stat);
  if (status == OK) *value = atomic_load(&comm->family->bytes);
  return status;
}
