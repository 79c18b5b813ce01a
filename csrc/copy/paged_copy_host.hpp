#pragma once

#include <cstdint>

#include "copy/copy_plan.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer {

/// Copies every row of `plan` with the threads of `pool`, both sides being mapped here. Returns
/// when all bytes are stored and ordered before any later store of the calling thread.
/// `bypass_cache` writes around the caches (non-temporal stores), which pays where the bytes exceed
/// the last-level cache; a conversion is always written through them.
void paged_copy_host(WorkerPool& pool, const CopyPlan& plan, bool bypass_cache);

/// Which side of a cross-memory copy lies in the other process.
enum class RemoteSide { kSource, kDestination };

/// Copies every row of `plan` between this process and process `pid` by cross-memory attach
/// (process_vm_readv, process_vm_writev). Throws Error(kNotAvailable) where the kernel denies
/// access, Error(kPeerLost) where the process is gone, Error(kTransferFailed) where an address is
/// not mapped.
void paged_copy_process_vm(WorkerPool& pool, const CopyPlan& plan, int pid, RemoteSide remote);

}  // namespace kvxfer
