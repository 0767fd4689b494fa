// All-reduce of sparse COO tensors (gradients of Embedding(sparse=True)).
//
// Ranks have different indices, so nothing can be summed in place. Three all-gathers bring the
// numbers of entries, the indices and the values of all ranks together, in rank order. Each rank
// coalesces them. Bytes read per rank: the entries of all other ranks.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <numeric>

#include "base/entry_lock.hpp"
#include "calls/checks.hpp"
#include "calls/doors.hpp"

namespace fastcoll {
namespace {

constexpr int64_t kMostDims = 24;

class SparseCall : public Call {
 public:
  SparseCall(const CallSite& call, at::Tensor tensor)
      : Call(call, tensor), tensor_(std::move(tensor)), ranks_(call.size) {}

  void run(CpuEngine& engine) override {
    beforeWait();
    kept_.clear();
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor mine = tensor_.coalesce();
    // Header: entries, sparse and dense dimensions, sizes. All but the first must be equal.
    at::Tensor header = at::zeros({3 + kMostDims}, at::kLong);
    auto* fields = header.data_ptr<int64_t>();
    fields[0] = mine._nnz();
    fields[1] = mine.sparse_dim();
    fields[2] = mine.dense_dim();
    for (int64_t i = 0; i < mine.dim(); ++i) fields[3 + i] = mine.size(i);
    const at::Tensor headers = gather(engine, header, std::vector<int64_t>(ranks_, header.numel()));
    std::vector<int64_t> indexCounts;
    std::vector<int64_t> valueCounts;
    int64_t entries = 0;
    const at::Tensor indices = mine.indices().t().contiguous();  // an entry's are consecutive
    const at::Tensor values = mine.values().contiguous();
    const int64_t perValue = fields[0] == 0 ? densePart(mine) : values.numel() / fields[0];
    for (int peer = 0; peer < ranks_; ++peer) {
      const auto* theirs = headers.data_ptr<int64_t>() + peer * header.numel();
      for (int64_t i = 1; i < header.numel(); ++i) {
        if (theirs[i] != fields[i]) {
          throw Error(ErrorKind::Backend, site.errorSite(),
                      "Detected mismatch: the sparse tensor of rank ", peer,
                      " has other dimensions than that of rank ", site.rank,
                      ". Reduce tensors of one shape.");
        }
      }
      entries += theirs[0];
      indexCounts.push_back(theirs[0] * fields[1]);
      valueCounts.push_back(theirs[0] * perValue);
    }
    const at::Tensor allIndices = gather(engine, indices.reshape({-1}), indexCounts);
    const at::Tensor allValues = gather(engine, values.reshape({-1}), valueCounts);
    auto shape = values.sizes().vec();
    shape[0] = entries;
    at::Tensor sum = at::sparse_coo_tensor(allIndices.reshape({entries, fields[1]}).t(),
                                           allValues.reshape(shape), mine.sizes())
                         .coalesce();
    if (request.op == ReduceOp::Avg) {  // integers are cut towards zero, as elsewhere
      const bool integers = at::isIntegralType(sum.scalar_type(), false);
      sum = integers ? at::div(sum, ranks_, "trunc") : at::div(sum, ranks_);
    }
    tensor_.copy_(sum);
  }

 private:
  static int64_t densePart(const at::Tensor& tensor) {
    int64_t count = 1;
    for (int64_t i = tensor.sparse_dim(); i < tensor.dim(); ++i) count *= tensor.size(i);
    return count;
  }

  /// Returns the elements of all ranks, `counts[rank]` of each.
  at::Tensor gather(CpuEngine& engine, const at::Tensor& mine, const std::vector<int64_t>& counts) {
    Request part;
    part.collective = Collective::AllGather;
    part.seq = request.seq;
    part.timeout = request.timeout;
    part.dtype = dtypeOf(mine.scalar_type());
    part.count = mine.numel();
    part.in.emplace_back(mine.data_ptr(), mine.nbytes());
    part.out.resize(counts.size());
    part.expectedCount.assign(counts.begin(), counts.end());
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    at::Tensor all = at::empty({total}, mine.options());
    auto* next = static_cast<std::uint8_t*>(all.data_ptr());
    for (std::size_t peer = 0; peer < counts.size(); ++peer) {
      const std::size_t bytes = counts[peer] * mine.element_size();
      part.out[peer].append(next, bytes);
      next += bytes;
    }
    kept_.insert(kept_.end(), {all, mine});
    engine.run(part);
    return all;
  }

  at::Tensor tensor_;
  std::vector<at::Tensor> kept_;  // memory that an abandoned transfer may still touch
  int ranks_;
};

}  // namespace

CallRef Doors::allReduceSparse(Tensors& tensors, const c10d::AllreduceOptions& opts) const {
  const CallSite site = at(calls::AllReduceSparse);
  if (tensors.size() != 1 || tensors[0].layout() != at::kSparse || !tensors[0].is_cpu()) {
    refuse(site, "one sparse COO tensor on the CPU",
           tensors.size() != 1
               ? concat(tensors.size(), " tensors")
               : concat("one of layout ", tensors[0].layout(), " on ", tensors[0].device().str()));
  }
  if (tensors[0].dim() > kMostDims) {
    refuse(site, concat("at most ", kMostDims, " dimensions"), concat(tensors[0].dim()));
  }
  auto call = std::make_shared<SparseCall>(site, tensors[0]);
  setReduction(*call, call->request, opts.reduceOp);
  if (call->request.op != ReduceOp::Sum && call->request.op != ReduceOp::Avg) {
    refuse(site, "SUM or AVG for a sparse tensor",
           concat(reduceOpName(call->request.op), ". Use .to_dense()."));
  }
  return asked(std::move(call), opts, tensors, tensors);
}

}  // namespace fastcoll
