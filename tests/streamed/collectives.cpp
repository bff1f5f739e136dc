// Collectives on the device: gloo moves the bytes, on a stream of the group's own, as NCCL would. What arrives
// is in place when somebody has waited for it, and not before. And what Python sees of the device.
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "machine.h"

namespace streamed {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

class StreamWork final : public Work {
 public:
  StreamWork(c10::intrusive_ptr<Work> gloo, Tensors outputs, Tensors arrived, Tensors inputs, Clock done)
      : gloo_(std::move(gloo)),
        outputs_(std::move(outputs)),
        arrived_(std::move(arrived)),
        inputs_(std::move(inputs)),
        done_(std::move(done)) {}

  bool wait(std::chrono::milliseconds) override {
    if (gloo_) {
      gloo_->wait();
      gloo_.reset();
      for (size_t i = 0; i < outputs_.size(); ++i) host_view(outputs_[i]).copy_(arrived_[i]);
    }
    Machine::get().wait(Machine::get().current(), done_);
    outputs_.clear();  // until now they were kept from being freed, as NCCL's are
    inputs_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return Machine::get().query(done_); }
  bool isSuccess() const override { return true; }

 private:
  c10::intrusive_ptr<Work> gloo_;
  Tensors outputs_, arrived_, inputs_;
  Clock done_;
};

class StreamBackend final : public c10d::Backend {
 public:
  explicit StreamBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(Machine::get().new_stream()) {}

  const std::string getBackendName() const override { return "streamed"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start("broadcast", tensors, tensors, [&](Tensors, Tensors out) {
      return gloo_->broadcast(out, options);
    });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start("all_reduce", tensors, tensors, [&](Tensors, Tensors out) {
      return gloo_->allreduce(out, options);
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return start("all_gather", {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->_allgather_base(out[0], in[0], options);
    });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start("reduce_scatter", {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->_reduce_scatter_base(out[0], in[0], options);
    });
  }
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return start("all_to_all", {input}, {output}, [&](Tensors in, Tensors out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return start("send", tensors, {}, [&](Tensors in, Tensors) { return gloo_->send(in, to, tag); });
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return start("recv", {}, tensors, [&](Tensors, Tensors out) { return gloo_->recv(out, from, tag); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  // Launches on the group's stream, after what the current stream has launched.
  template <typename Launch>
  c10::intrusive_ptr<Work> start(
      const char* what, const Tensors& inputs, const Tensors& outputs, const Launch& launch) {
    Machine& machine = Machine::get();
    machine.wait(stream_, machine.clock_of(machine.current()));
    Tensors in, arrived;
    std::vector<Span> reads, writes;
    for (const at::Tensor& tensor : inputs) {
      reads.push_back(span_of(tensor));
      in.push_back(host_view(tensor));
    }
    for (const at::Tensor& tensor : outputs) {
      writes.push_back(span_of(tensor));
      arrived.push_back(host_view(tensor).clone());
    }
    machine.launch(stream_, what, reads, writes);
    auto gloo = launch(in, arrived);
    return c10::make_intrusive<StreamWork>(gloo, outputs, arrived, inputs, machine.clock_of(stream_));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t stream_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("wrap", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<StreamBackend>(gloo);
  });
  module.def("on_report", [](py::function callback) {
    auto* kept = new py::function(std::move(callback));  // for the life of the process
    Machine::get().report = [kept](const std::string& kind, const std::string& text) {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire gil;
      (*kept)(kind, text);
    };
  });
  module.def("finish", [] { Machine::get().finish(); });
}

}  // namespace streamed
