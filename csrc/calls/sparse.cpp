// All-reduce of sparse COO tensors (gradients of Embedding(sparse=True)).
//
// Ranks have different indices, so nothing can be summed in place. Three all-gathers bring the
// numbers of entries, the indices and the values of all ranks together. Each rank concatenates them
// in rank order and coalesces. Bytes read per rank: the entries of all other ranks.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "calls/checks.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

constexpr int64_t kMostDims = 24;

class SparseTask : public TensorTask {
 public:
  SparseTask(const CallSite& call, at::Tensor tensor)
      : TensorTask(call, tensor), tensor_(std::move(tensor)), ranks_(call.size) {}

  void transfer(const RunOne& runOne) override {
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
    std::vector<at::Tensor> headers =
        gather(runOne, header, std::vector<int64_t>(ranks_, header.numel()));
    std::vector<int64_t> indexCounts;
    std::vector<int64_t> valueCounts;
    const at::Tensor indices = mine.indices().contiguous();
    const at::Tensor values = mine.values().contiguous();
    const int64_t perValue = fields[0] == 0 ? densePart(mine) : values.numel() / fields[0];
    for (std::size_t peer = 0; peer < headers.size(); ++peer) {
      const auto* theirs = headers[peer].data_ptr<int64_t>();
      for (int64_t i = 1; i < header.numel(); ++i) {
        if (theirs[i] != fields[i]) {
          throw Error(ErrorKind::Backend,
                      concat(site.prefix(), "Detected mismatch: the sparse tensor of rank ", peer,
                             " has other dimensions than that of rank ", site.rank,
                             ". Reduce tensors of one shape."));
        }
      }
      indexCounts.push_back(theirs[0] * fields[1]);
      valueCounts.push_back(theirs[0] * perValue);
    }
    const auto allIndices = gather(runOne, indices.reshape({-1}), indexCounts);
    const auto allValues = gather(runOne, values.reshape({-1}), valueCounts);
    std::vector<at::Tensor> indexParts;
    std::vector<at::Tensor> valueParts;
    for (std::size_t peer = 0; peer < headers.size(); ++peer) {
      const int64_t entries = headers[peer].data_ptr<int64_t>()[0];
      auto shape = values.sizes().vec();
      shape[0] = entries;
      indexParts.push_back(allIndices[peer].reshape({fields[1], entries}));
      valueParts.push_back(allValues[peer].reshape(shape));
    }
    at::Tensor sum =
        at::sparse_coo_tensor(at::cat(indexParts, 1), at::cat(valueParts, 0), mine.sizes())
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

  std::vector<at::Tensor> gather(const RunOne& runOne, const at::Tensor& mine,
                                 const std::vector<int64_t>& counts) {
    Request part;
    part.collective = Collective::AllGather;
    part.seq = request.seq;
    part.timeout = request.timeout;
    part.dtype = dtypeOf(mine.scalar_type());
    part.count = mine.numel();
    const std::size_t element = mine.element_size();
    part.in.resize(1);
    part.in[0].append(mine.data_ptr(), mine.numel() * element);
    std::vector<at::Tensor> all;
    part.out.resize(counts.size());
    for (std::size_t peer = 0; peer < counts.size(); ++peer) {
      all.push_back(at::empty({counts[peer]}, mine.options()));
      part.out[peer].append(all.back().data_ptr(), counts[peer] * element);
      part.expectedCount.push_back(counts[peer]);
    }
    kept_.insert(kept_.end(), all.begin(), all.end());
    kept_.push_back(mine);
    runOne(part);
    return all;
  }

  at::Tensor tensor_;
  std::vector<at::Tensor> kept_;  // memory that an abandoned transfer may still touch
  int ranks_;
};

}  // namespace

ProcessGroupFastcoll::WorkRef ProcessGroupFastcoll::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site(calls::AllReduceSparse);
    if (tensors.size() != 1 || tensors[0].layout() != at::kSparse || !tensors[0].is_cpu()) {
      refuse(site, "one sparse COO tensor on the CPU",
             tensors.size() != 1 ? concat(tensors.size(), " tensors")
                                 : concat("one of layout ", tensors[0].layout(), " on ",
                                          tensors[0].device().str()));
    }
    if (tensors[0].dim() > kMostDims) {
      refuse(site, concat("at most ", kMostDims, " dimensions"), concat(tensors[0].dim()));
    }
    auto task = std::make_shared<SparseTask>(site, tensors[0]);
    setReduction(*task, task->request, opts.reduceOp);
    if (task->request.op != ReduceOp::Sum && task->request.op != ReduceOp::Avg) {
      refuse(site, "SUM or AVG for a sparse tensor",
             concat(reduceOpName(task->request.op), ". Use .to_dense()."));
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, tensors, tensors});
  });
}

}  // namespace fastcoll
