// A device "emu" whose memory is the processor's: its operators run the processor's kernels on the same bytes.
//
// It has what an accelerator has and a test can see: tensors that no kernel mixes with the processor's, an autograd
// thread of its own, streams and events, and a log of every copy to the host or the device, of every wait of the host
// for the device, and of every operator that a stream runs, with the processor time that these take. Streams run at
// once, or late (late.h).
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ForeachUtils.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "late.h"

namespace {

using late::device;
using late::pools;
using late::Position;

using at::Tensor;
using Tensors = std::vector<Tensor>;
constexpr auto EMU = c10::DeviceType::PrivateUse1;
constexpr auto EMU_KEY = c10::DispatchKey::PrivateUse1;
const c10::Device DEVICE(EMU, 0);

// How many devices a host says it has, though all of them are one: EMU_DEVICES, or one for each rank.
c10::DeviceIndex device_count() {
  const char* count = std::getenv("EMU_DEVICES");
  return static_cast<c10::DeviceIndex>(count ? std::atoi(count) : 8);
}

std::mutex log_mutex;
std::vector<std::string> events;

void note(const std::string& event) {
  std::lock_guard<std::mutex> lock(log_mutex);
  events.push_back(event);
}

// Whether the log also tells what `tests/accelerator/races.py` reads: which memory is taken, freed, read and written, on
// which stream, and which event each stream and the host wait for.
std::atomic<bool> notes_memory{false};

void note_memory(const std::string& event) {
  if (notes_memory) {
    note(event);
  }
}

std::string address(const void* memory) {
  return std::to_string(reinterpret_cast<uintptr_t>(memory));
}

thread_local c10::StreamId current_stream = 0;

// The host waits for a stream: the current one, unless another is named.
void note_wait(const std::string& by, c10::StreamId stream = current_stream) {
  note("sync " + by);
  note_memory("host after stream " + std::to_string(stream));
}

std::atomic<int64_t> busy{0};

// Adds up the time of this thread until the end of a block.
struct Busy {
  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1'000'000'000 * time.tv_sec + time.tv_nsec;
  }
  int64_t start = now();
  ~Busy() {
    busy += now() - start;
  }
};

// ---- memory

constexpr size_t ALIGNMENT = 64;

// The bytes of the device that are in use. Results of operators count too, though the processor's allocator made them.
class Usage {
 public:
  // Count a storage over some memory; views of that memory through other storages count once.
  void add(const void* memory, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& block = blocks_[memory];
    if (block.storages++ == 0) {
      note_memory("take " + address(memory) + " " + std::to_string(nbytes) + " on " + std::to_string(current_stream));
      block.nbytes = nbytes;
      allocated_ += nbytes;
      peak_ = std::max(peak_, allocated_);
    }
  }
  void remove(const void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.find(memory);
    if (--block->second.storages == 0) {
      note_memory("free " + address(memory));
      allocated_ -= block->second.nbytes;
      blocks_.erase(block);
    }
  }
  int64_t allocated() {
    std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
  }
  int64_t peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }

 private:
  struct Block {
    int64_t nbytes = 0;
    int64_t storages = 0;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Block> blocks_;
  int64_t allocated_ = 0;
  int64_t peak_ = 0;
};
// Never destroyed, because tensors may outlive the library's variables.
Usage& usage = *new Usage;

void free_emu(void* memory) {
  usage.remove(memory);
  std::free(memory);
}

void free_late(void* memory) {
  usage.remove(memory);
  pools.release(memory);
}

void free_pinned(void* memory) {
  pools.release(memory);
}

struct EmuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, DEVICE};
    }
    const bool is_late = device.is_late();
    void* memory = is_late ? pools.allocate(nbytes, current_stream)
                           : std::aligned_alloc(ALIGNMENT, (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    usage.add(memory, nbytes);
    return {memory, memory, is_late ? &free_late : &free_emu, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_emu;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};
EmuAllocator allocator;
REGISTER_ALLOCATOR(EMU, &allocator)

// Memory of the host that streams can read and write.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = pools.allocate(nbytes, late::HOST);
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};
PinnedAllocator pinned_allocator;

struct EmuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::globalContext().defaultGenerator(c10::kCPU);
    return generator;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return DEVICE;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* memory) const override {
    return pools.is_pinned(memory);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto memory = allocator.allocate(nbytes);
    if (nbytes && storage.nbytes()) {
      note_memory(
          "launch resize_ on " + std::to_string(current_stream) + " reads " + address(storage.data()) + " writes " +
          address(memory.get()));
      const auto copy = [target = memory.get(), source = storage.data(), count = std::min(nbytes, storage.nbytes())] {
        memcpy(target, source, count);
      };
      device.enqueue(current_stream, {copy});
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// ---- streams: what is enqueued runs at once or late, and the log has its order

std::atomic<c10::StreamId> streams{0};
std::atomic<int64_t> recordings{0};

// A recording of an event: what its stream had in its queue.
struct EmuEvent {
  Position position;
  int64_t recording = 0;
};

struct EmuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return EMU;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = getStream(DEVICE);
    current_stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto* made = *event == nullptr ? new EmuEvent : static_cast<EmuEvent*>(*event);
    *made = {device.here(stream.id()), ++recordings};
    *event = made;
    note_memory("event " + std::to_string(made->recording) + " of " + std::to_string(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto& source = *static_cast<EmuEvent*>(event);
    note("order stream " + std::to_string(stream.id()) + " after " + std::to_string(source.position.stream));
    note_memory("stream " + std::to_string(stream.id()) + " after event " + std::to_string(source.recording));
    device.order(stream.id(), source.position);
  }
  bool queryEvent(void* event) const override {
    return device.poll(*static_cast<Position*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EmuEvent*>(event);
  }
  void synchronizeEvent(void* event) const override {
    const auto& source = *static_cast<EmuEvent*>(event);
    note("sync event");
    note_memory("host after event " + std::to_string(source.recording));
    device.drain(source.position);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return device.poll(device.here(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("stream", stream.id());
    device.drain(device.here(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    note("sync device");
    note_memory("host after device");
    device.drain_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    note("record stream " + std::to_string(stream.id()));
    note_memory("keep " + address(memory.get()) + " for " + std::to_string(stream.id()));
    pools.record_use(memory.get(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, EmuGuard)

// ---- the same bytes as a tensor of the other device

void release_host(void* context) {
  delete static_cast<c10::Storage*>(context);
}

void release_emu(void* context) {
  auto* kept = static_cast<c10::Storage*>(context);
  if (kept->data() != nullptr) {
    usage.remove(kept->data());
  }
  delete kept;
}

c10::Storage storage_over(const c10::Storage& storage, c10::Device device) {
  auto* kept = new c10::Storage(storage);
  auto* deleter = device == DEVICE ? &release_emu : &release_host;
  if (device == DEVICE && storage.data() != nullptr) {
    usage.add(storage.data(), storage.nbytes());
  }
  c10::DataPtr memory(const_cast<void*>(storage.data()), kept, deleter, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(device.type()), true);
}

Tensor with_storage(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    made._set_conj(true);
  }
  if (like.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

Tensor on_host(const Tensor& tensor) {
  return with_storage(tensor, storage_over(tensor.storage(), c10::kCPU), c10::DispatchKey::CPU);
}

// The same for a task that runs late, which does not keep the memory.
Tensor for_task(const Tensor& tensor) {
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), c10::kCPU);
  const auto nbytes = tensor.storage().nbytes();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), nbytes, std::move(memory), c10::GetAllocator(c10::kCPU), true);
  return with_storage(tensor, std::move(storage), c10::DispatchKey::CPU);
}

Tensor on_emu(const Tensor& tensor) {
  return with_storage(tensor, storage_over(tensor.storage(), DEVICE), EMU_KEY);
}

bool is_emu(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == EMU;
}

// ---- new tensors and views

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
  auto nbytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, allocator.allocate(nbytes), &allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(EMU_KEY), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  auto made = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pinned);
  if (format.value_or(c10::MemoryFormat::Contiguous) != c10::MemoryFormat::Contiguous) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

Tensor strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

// The same view of a tensor that `viewed` is of its bytes on the host.
Tensor view_by(const Tensor& self, const Tensor& viewed) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), viewed.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(viewed.sizes(), viewed.strides(), viewed.storage_offset());
  return made;
}

// ---- operators

void check_devices(const c10::OperatorHandle& op, const std::vector<Tensor>& tensors) {
  bool emu = false;
  const Tensor* host = nullptr;
  for (const auto& tensor : tensors) {
    emu = emu || is_emu(tensor);
    // As on other accelerators, a number of the processor goes with any tensor.
    if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
      host = &tensor;
    }
  }
  TORCH_CHECK(!(emu && host), op.schema().name(), ": expected all tensors to be on the same device, found emu and cpu");
}

// A tensor in memory of the current stream, with the values of one of the host.
Tensor upload(const Tensor& host) {
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, {}, {});
  device.enqueue(current_stream, {[target = for_task(made), source = host.clone()] { target.copy_(source); }});
  return made;
}

// The result of an operator that has run on the host's views of its arguments.
Tensor take_result(const Tensor& host, const std::vector<Tensor>& arguments) {
  if (!host.defined()) {
    return host;
  }
  for (const auto& argument : arguments) {
    if (is_emu(argument) && host.storage().data() && host.storage().data() == argument.storage().data()) {
      return view_by(argument, host);
    }
  }
  return device.is_late() ? upload(host) : on_emu(host);
}

// An operator may have made its out= larger.
void take_resized(const Tensor& tensor, const Tensor& host) {
  if (is_emu(tensor) && host.storage().data() != tensor.storage().data()) {
    auto made = device.is_late() ? upload(host) : on_emu(host);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  }
  if (is_emu(tensor) && host.sizes() != tensor.sizes()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

using Arguments = std::vector<c10::IValue>;

std::vector<Tensor> tensors_in(const Arguments& arguments) {
  std::vector<Tensor> tensors;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
      for (const auto& item : value.toListRef()) {
        if (item.isTensor()) {
          tensors.push_back(item.toTensor());
        }
      }
    }
  }
  return tensors;
}

using Change = std::function<Tensor(const Tensor&)>;

// Change the tensors of an argument or result.
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& item : value.toTensorVector()) {
      changed.push_back(change(item));
    }
    return changed;
  }
  const bool is_list = value.isOptionalTensorList() || value.isList();
  if (is_list && !tensors_in({value}).empty()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& item : value.toListRef()) {
      changed.push_back(item.isTensor() ? std::optional<Tensor>(change(item.toTensor())) : std::nullopt);
    }
    return changed;
  }
  return value;
}

Arguments on_device(const Arguments& arguments, c10::Device place, const Change& change) {
  Arguments changed;
  for (const auto& value : arguments) {
    changed.push_back(value.isDevice() ? c10::IValue(place) : with_tensors(value, change));
  }
  return changed;
}

// The argument that a result is, of an operator that writes in place or into out=.
std::optional<size_t> argument_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr || !alias->isWrite()) {
    return std::nullopt;
  }
  std::optional<size_t> position;
  for (size_t k = 0; k < schema.arguments().size(); ++k) {
    const auto* other = schema.arguments()[k].alias_info();
    if (other != nullptr && *other == *alias) {
      position = k;
    }
  }
  return position;
}

// The memory that a kernel reads and writes.
class Launch {
 public:
  void reads(const c10::IValue& value) {
    add(value, reads_);
  }
  void writes(const c10::IValue& value) {
    add(value, writes_);
  }
  void log(const std::string& name) const {
    note_memory("launch " + name + " on " + std::to_string(current_stream) + " reads" + reads_ + " writes" + writes_);
  }

 private:
  static void add(const c10::IValue& value, std::string& addresses) {
    if (!notes_memory) {
      return;
    }
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      // Numbers of the host are arguments of the launch.
      if (tensor.defined() && (is_emu(tensor) || tensor.dim() > 0) && tensor.storage().data() != nullptr) {
        addresses += (is_emu(tensor) ? " " : " host:") + address(tensor.storage().data());
      }
    } else if (value.isList()) {
      for (const auto& item : value.toListRef()) {
        add(item, addresses);
      }
    }
  }

  std::string reads_;
  std::string writes_;
};

// Log an operator that has run: its schema tells which arguments it writes, and which results are views.
void log_launch(const c10::FunctionSchema& schema, const Arguments& given, const Arguments& results) {
  Launch launch;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      launch.writes(given[i]);
    } else if (alias == nullptr) {
      launch.reads(given[i]);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) {
      launch.writes(results[i]);
    }
  }
  launch.log(schema.name());
}

// Run an operator now, on what its arguments hold now.
Arguments run_now(const c10::OperatorHandle& op, const Arguments& given) {
  Busy timer;
  const auto& schema = op.schema();
  const auto arguments = tensors_in(given);
  const auto hosts = on_device(given, c10::kCPU, [](const Tensor& each) { return is_emu(each) ? on_host(each) : each; });
  auto stack = hosts;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (const auto position = argument_of(schema, i)) {
      if (given[*position].isTensor()) {
        // Not the result: torch 2.11 returns undefined tensors for several out=.
        take_resized(given[*position].toTensor(), hosts[*position].toTensor());
      }
      value = given[*position];
    } else {
      value = with_tensors(value, [&](const Tensor& each) { return take_result(each, arguments); });
    }
  }
  return stack;
}

// ---- operators that run late

// As another device, which knows shapes alone, sees a tensor.
Tensor on_meta(const Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, c10::kMeta),
      c10::GetAllocator(c10::kMeta), true);
  return with_storage(tensor, std::move(storage), c10::DispatchKey::Meta);
}

// Make the results of an operator that has not run; nothing if they depend on values, or it has to run in order.
std::optional<Arguments> make_results(const c10::OperatorHandle& op, const Arguments& given, bool& is_view) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    return std::nullopt;
  }
  std::vector<std::pair<Tensor, Tensor>> sources;
  Arguments results;
  bool has_new = false;
  is_view = !schema.returns().empty();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto position = argument_of(schema, i);
    results.push_back(position ? given[*position] : c10::IValue());
    has_new = has_new || !position;
    is_view = is_view && !position;
    // An out= without elements is made larger.
    if (position && given[*position].isTensor() && given[*position].toTensor().numel() == 0) {
      return std::nullopt;
    }
  }
  if (!has_new) {
    return results;
  }
  auto shapes = on_device(given, c10::kMeta, [&](const Tensor& each) {
    sources.emplace_back(each, on_meta(each));
    return sources.back().second;
  });
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  const auto make = [&](const Tensor& shape) {
    for (const auto& [argument, meta] : sources) {
      if (shape.storage().is_alias_of(meta.storage())) {
        return view_by(argument, shape);
      }
    }
    is_view = false;
    return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, {}, {});
  };
  for (size_t i = 0; i < results.size(); ++i) {
    if (argument_of(schema, i)) {
      continue;
    }
    if (!shapes[i].isTensor() && !shapes[i].isTensorList()) {
      return std::nullopt;
    }
    results[i] = with_tensors(shapes[i], make);
  }
  return results;
}

// The processor's numbers are read now; tasks do not keep what Python may know.
Tensor argument_for_task(const Tensor& tensor) {
  if (is_emu(tensor)) {
    return for_task(tensor);
  }
  auto copied = tensor.detach().clone();
  copied.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copied;
}

Arguments run_late(const c10::OperatorHandle& op, const Arguments& given) {
  bool is_view = false;
  const auto results = make_results(op, given, is_view);
  if (!results) {
    device.drain(device.here(current_stream));
    return run_now(op, given);
  }
  if (is_view) {
    return *results;
  }
  const auto run = [op, stack = on_device(given, c10::kCPU, argument_for_task),
                    targets = on_device(*results, c10::kCPU, for_task)]() mutable {
    Busy timer;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto from = tensors_in({stack[i]}), to = tensors_in({targets[i]});
      for (size_t k = 0; k < to.size(); ++k) {
        if (!to[k].defined() || from[k].storage().data() == to[k].storage().data()) {
          continue;
        }
        TORCH_CHECK(!argument_of(op.schema(), i), op.schema().name(), ": an out= would change its size late");
        to[k].copy_(from[k]);
      }
    }
  };
  device.enqueue(current_stream, {run});
  return *results;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const Arguments given(stack->end() - schema.arguments().size(), stack->end());
  check_devices(op, tensors_in(given));
  note("run " + schema.name() + " on " + std::to_string(current_stream));
  auto results = device.is_late() ? run_late(op, given) : run_now(op, given);
  if (notes_memory) {
    log_launch(schema, given, results);
  }
  for (const auto& value : results) {
    if (value.isBool()) {
      note_wait(schema.name());
    }
  }
  torch::jit::drop(*stack, schema.arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

// ---- operators of this device

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return view_by(self, on_host(self).view(size));
}

Tensor view_dtype(const Tensor& self, c10::ScalarType dtype) {
  return view_by(self, on_host(self).view(dtype));
}

Tensor view_as_real(const Tensor& self) {
  return view_by(self, at::view_as_real(on_host(self)));
}

Tensor view_as_complex(const Tensor& self) {
  return view_by(self, at::view_as_complex(on_host(self)));
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided(self, size, stride, std::nullopt);
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_by(self, on_host(self).unfold(dim, size, step));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto stride = c10::contiguous_strides(size);
  auto nbytes = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, self.storage_offset());
  return self;
}

Tensor& set_(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == DEVICE, "set_: expected a storage on emu, found ", source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.data() == nullptr && !size.empty() ? c10::IntArrayRef(c10::contiguous_strides(size)) : stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_(self, std::move(source), 0, {numel}, {1});
}

Tensor& set_empty(Tensor& self) {
  return set_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}

// Whether a stream can copy it while the host goes on.
bool is_for_streams(const Tensor& tensor) {
  return is_emu(tensor) || pools.is_pinned(tensor.storage().data());
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool to_host = is_emu(source) && !is_emu(self);
  const bool crosses = is_emu(self) != is_emu(source);
  bool waits = false;
  if (crosses) {
    const bool is_pageable = !is_for_streams(self) || !is_for_streams(source);
    note(std::string(to_host ? "to host " : "to emu ") + std::to_string(source.numel()) + (non_blocking ? " async" : ""));
    waits = source.numel() > 0 && (!non_blocking || is_pageable);
  } else {
    note("run aten::copy_ on " + std::to_string(current_stream));
  }
  Launch launch;
  launch.reads(source);
  launch.writes(self);
  launch.log("aten::copy_");
  for (const auto& each : {self, source}) {
    if (!is_emu(each)) {
      pools.record_use(each.storage().data(), current_stream);
    }
  }
  const auto run = [to = for_task(self), from = for_task(source)] {
    Busy timer;
    to.copy_(from);
  };
  if (waits) {
    note_wait(non_blocking ? "copy_ of pageable memory" : "copy_");
    device.drain(device.here(current_stream));
    run();
  } else {
    device.enqueue(current_stream, {run});
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor self = target;
  copy_(self, source, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  Launch launch;
  launch.reads(self);
  launch.log("aten::_local_scalar_dense");
  note_wait("aten::_local_scalar_dense");
  device.drain(device.here(current_stream));
  return on_host(self).item();
}

bool equal(const Tensor& self, const Tensor& other) {
  Launch launch;
  launch.reads(self);
  launch.reads(other);
  launch.log("aten::equal");
  note_wait("aten::equal");
  device.drain(device.here(current_stream));
  return on_host(self).equal(on_host(other));
}

void record_stream(Tensor& self, c10::Stream stream) {
  note("record stream " + std::to_string(stream.id()));
  note_memory("keep " + address(self.storage().data()) + " for " + std::to_string(stream.id()));
  pools.record_use(self.storage().data(), stream.id());
}

// Their results' shapes depend on values.
void run_and_wait(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack);
  note_wait(op.schema().name());
}

// An index of the processor is copied to the device, which the host waits for.
void run_index(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& value : *stack) {
    if (!value.isOptionalTensorList()) {
      continue;
    }
    c10::List<std::optional<Tensor>> moved;
    for (const auto& item : value.toListRef()) {
      std::optional<Tensor> each;
      if (item.isTensor()) {
        each = item.toTensor();
        if (each->defined() && !is_emu(*each)) {
          note("to emu " + std::to_string(each->numel()));
          note_wait("index");
          each = device.is_late() ? upload(*each) : on_emu(each->clone());
          device.drain(device.here(current_stream));
        } else if (each->scalar_type() == c10::kBool || each->scalar_type() == c10::kByte) {
          note_wait("index by a mask");
        }
      }
      moved.push_back(each);
    }
    value = std::move(moved);
  }
  run_on_host(op, stack);
}

// An operator on lists: one kernel under the conditions by which CUDA has one, else one for each entry.
void run_list(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool is_copy = op.schema().name() == "aten::_foreach_copy_";
  std::vector<Tensors> lists;
  bool is_one_kernel = true;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensorList()) {
      lists.push_back(value.toTensorVector());
    } else if (value.isTensor()) {
      const auto number = value.toTensor();
      is_one_kernel = is_one_kernel && (!is_emu(number) || number.scalar_type() == lists[0][0].scalar_type());
    }
  }
  const std::vector<at::TensorList> views(lists.begin(), lists.end());
  is_one_kernel = is_one_kernel && at::native::_check_tensors_share_device_and_dtype(views, is_copy) &&
      at::native::_check_tensors_share_sizes_and_strides(views);
  for (size_t i = 1; !is_one_kernel && i < lists[0].size(); ++i) {
    note("run " + op.schema().name() + " on " + std::to_string(current_stream));
  }
  run_on_host(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Autocast casts nothing here, and lets operators through.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_", set_empty);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
  m.impl("record_stream", record_stream);
  for (const char* name : {"nonzero", "masked_select", "_unique2", "unique_consecutive", "repeat_interleave.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_and_wait>());
  }
  for (const char* name : {"index.Tensor", "_index_put_impl_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_index>());
  }
  for (const char* name : {"_foreach_copy_", "_foreach_add_.Scalar", "_foreach_div_.Scalar", "_foreach_div_.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_list>());
  }
}

// ---- collectives: those of gloo, on the same bytes

struct Works final : c10d::Work {
  explicit Works(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

using Started = c10::intrusive_ptr<c10d::Work>;

// A rank's rows of what gloo gives all ranks, or as one tensor. gloo's own do not tell when they are completed.
struct TakeRows final : c10d::Work {
  TakeRows(Started work, Tensor row, Tensor out)
      : work_(std::move(work)), row_(std::move(row)), out_(std::move(out)) {}
  bool isCompleted() override {
    return work_->isCompleted();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    work_->wait(timeout);
    out_.copy_(row_);
    return true;
  }

 private:
  Started work_;
  Tensor row_;
  Tensor out_;
};

// A collective that runs late, on a stream of its own. As NCCL's it keeps its tensors until somebody waits, which lets
// the current stream wait, and the host only for a barrier.
struct LateWork final : c10d::Work {
  LateWork(Position end, Tensors tensors, bool blocks) : end_(end), tensors_(std::move(tensors)), blocks_(blocks) {}
  ~LateWork() override {
    for (const auto& tensor : tensors_) {
      pools.record_use(tensor.storage().data(), end_.stream);
    }
  }
  bool isCompleted() override {
    return device.poll(end_);
  }
  bool wait(std::chrono::milliseconds) override {
    if (blocks_) {
      device.drain(end_);
    }
    device.order(current_stream, end_);
    tensors_.clear();
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }

 private:
  Position end_;
  Tensors tensors_;
  bool blocks_;
};

// As NCCL's it fuses lists of tensors, and takes none of the processor's, nor complex ones.
struct EmuBackend final : c10d::Backend {
  explicit EmuBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(++streams) {}

  const std::string getBackendName() const override {
    return "emuccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(tensors, [gloo = gloo_, moved = host(tensors), options]() mutable {
      return gloo->broadcast(moved, options);
    });
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start(tensors, [gloo = gloo_, moved = host(tensors), options]() mutable {
      return gloo->allreduce(moved, options);
    });
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return start_each(tensors, tensors, [gloo = gloo_, options](Tensor& out, Tensor&) {
      Tensors one{out};
      return gloo->allreduce(one, options);
    });
  }
  Started _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors outs{out}, ins{in};
    return allgather_into_tensor_coalesced(outs, ins, options);
  }
  Started allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return start_each(out, in, [gloo = gloo_, options](Tensor& target, Tensor& source) {
      return gloo->_allgather_base(target, source, options);
    });
  }
  Started _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors outs{out}, ins{in};
    return reduce_scatter_tensor_coalesced(outs, ins, options);
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions sum;
    sum.reduceOp = options.reduceOp;
    sum.timeout = options.timeout;
    return start_each(out, in, [gloo = gloo_, sum](Tensor& target, Tensor& source) -> Started {
      Tensors rows{source.clone(at::MemoryFormat::Contiguous)};
      auto row = rows[0].view({gloo->getSize(), -1})[gloo->getRank()].view(target.sizes());
      return c10::make_intrusive<TakeRows>(gloo->allreduce(rows, sum), row, target);
    });
  }
  Started alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    return start({out, in}, [=, gloo = gloo_, target = host(out), source = host(in)]() mutable {
      return gloo->alltoall_base(target, source, out_splits, in_splits, options);
    });
  }
  // Of flat tensors.
  Started alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options) override {
    auto tensors = outs;
    tensors.insert(tensors.end(), ins.begin(), ins.end());
    return start(tensors, [=, gloo = gloo_, targets = host(outs), sources = host(ins)]() mutable -> Started {
      std::vector<int64_t> out_splits, in_splits;
      for (size_t i = 0; i < targets.size(); ++i) {
        out_splits.push_back(targets[i].numel());
        in_splits.push_back(sources[i].numel());
      }
      auto source = at::cat(sources);
      auto target = at::empty({std::accumulate(out_splits.begin(), out_splits.end(), int64_t{0})}, source.options());
      const auto rows = target.split_with_sizes(out_splits);
      const auto sent = gloo->alltoall_base(target, source, out_splits, in_splits, options);
      std::vector<Started> works;
      for (size_t i = 0; i < targets.size(); ++i) {
        works.push_back(c10::make_intrusive<TakeRows>(sent, rows[i], targets[i]));
      }
      return c10::make_intrusive<Works>(works);
    });
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    return start({}, [gloo = gloo_, options] { return gloo->barrier(options); }, true);
  }
  // gloo has none, but a receive that is waited for in vain ends its connection, and what waits there.
  void abort() override {
    device.abandon(stream_);
    std::vector<Started> receives;
    for (int rank = 0; rank < getSize(); ++rank) {
      Tensors one{at::empty({1})};
      if (rank != getRank()) {
        try {
          receives.push_back(gloo_->recv(one, rank, 1));
        } catch (const std::exception&) {
          // The connection has ended already.
        }
      }
    }
    for (auto& receive : receives) {
      try {
        receive->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }

 private:
  Started start(const Tensors& tensors, std::function<Started()> run, bool blocks = false) {
    if (!device.is_late()) {
      return run();
    }
    device.order(stream_, device.here(current_stream));
    auto work = std::make_shared<Started>();
    const auto is_over = [work] { return !*work || (*work)->isCompleted(); };
    const auto end = [work] {
      if (*work) {
        (*work)->wait();
      }
    };
    const auto position = device.enqueue_collective(
        stream_, {[work, run = std::move(run)] { *work = run(); }}, {end, std::nullopt, is_over});
    return c10::make_intrusive<LateWork>(position, tensors, blocks);
  }
  Started start_each(const Tensors& outs, const Tensors& ins, std::function<Started(Tensor&, Tensor&)> run) {
    auto tensors = outs;
    tensors.insert(tensors.end(), ins.begin(), ins.end());
    return start(tensors, [targets = host(outs), sources = host(ins), run]() mutable -> Started {
      if (targets.size() == 1) {
        return run(targets[0], sources[0]);
      }
      std::vector<Started> works;
      for (size_t i = 0; i < targets.size(); ++i) {
        works.push_back(run(targets[i], sources[i]));
      }
      return c10::make_intrusive<Works>(works);
    });
  }
  static Tensor host(const Tensor& tensor) {
    TORCH_CHECK(is_emu(tensor), "emuccl: expected a tensor on emu, found one on ", tensor.device());
    TORCH_CHECK(!tensor.is_complex(), "emuccl: expected real numbers, found ", tensor.scalar_type());
    return device.is_late() ? for_task(tensor) : on_host(tensor);
  }
  static Tensors host(const Tensors& tensors) {
    Tensors moved;
    for (const auto& tensor : tensors) {
      moved.push_back(host(tensor));
    }
    return moved;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::StreamId stream_;
};

std::vector<std::string> take_events() {
  std::lock_guard<std::mutex> lock(log_mutex);
  std::vector<std::string> taken;
  taken.swap(events);
  return taken;
}

const bool registered = [] {
  static EmuHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "run_late",
      [](uint64_t seed) {
        device.start(seed);
        [[maybe_unused]] static const int stops = std::atexit([] { device.stop(); });
      },
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Let streams run late from now on, in an order that a seed decides.");
  m.def(
      "run_at_once", [] { device.finish(); }, pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Run all that is enqueued, and each later operator when it is called.");
  m.def("take_events", take_events, "Return the log and begin a new one.");
  m.def("note", note, "Write a line to the log.");
  m.def("note_memory", [](bool value) { notes_memory = value; }, "Let the log tell of memory and events, or no longer.");
  m.def("allocated_bytes", [] { return usage.allocated(); }, "The bytes of the device that tensors hold.");
  m.def("peak_bytes", [] { return usage.peak(); }, "The most bytes that tensors held since reset_peak().");
  m.def("reset_peak", [] { usage.reset_peak(); }, "Let the peak begin at the bytes that tensors hold now.");
  m.def("busy_seconds", [] { return 1e-9 * busy; }, "The processor time that operators have taken so far.");
  m.def(
      "backend_over",
      [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<EmuBackend>(std::move(gloo));
      },
      "Make a backend for emu's tensors of one for the processor's.");
}
