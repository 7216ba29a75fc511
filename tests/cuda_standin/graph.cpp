/* Capture of streams into graphs, and what may not be called meanwhile. */
#include "streams.h"

namespace standin {
namespace {

struct Graph {
  std::vector<Work> nodes;
};
/* Never destroyed: threads of kernels may outlive main. */
auto& graphs = *new std::set<Graph*>;
auto& executables = *new std::set<Graph*>;

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* Whether a capture keeps this thread from calls that it would not see: cuThreadExchangeStreamCaptureMode. */
bool prohibits(const Capture& capture) {
  bool own = capture.thread == std::this_thread::get_id();
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  return own || (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

bool take(std::set<Graph*>& from, Graph* graph) {
  if (from.erase(graph) == 0) return false;
  delete graph;
  return true;
}

}  // namespace

CUresult may_escape_capture(const char* call) {
  for (auto* stream : streams) {
    bool prohibited = stream->capture != nullptr && prohibits(*stream->capture);
    if (!breaks(prohibited, "capture-escaped", call)) continue;
    stream->capture->spoiled = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult may_ask(Stream* stream, const char* call) {
  if (!breaks(stream->capture != nullptr, "capture-asked", call)) return CUDA_SUCCESS;
  stream->capture->spoiled = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

}  // namespace standin

using namespace standin;

extern "C" {

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (breaks(handle == nullptr, "capture-default", "the default stream is captured")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream == nullptr) return handle == nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  if (breaks(stream->capture != nullptr, "capture-once", "a stream is captured twice")) return CUDA_ERROR_ILLEGAL_STATE;
  stream->capture.reset(new Capture{mode, std::this_thread::get_id(), false, {}});
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *graph = nullptr;
  if (breaks(stream->capture == nullptr, "capture-begun", "a capture ends that never began")) return CUDA_ERROR_ILLEGAL_STATE;
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  bool other = stream->capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && stream->capture->thread != std::this_thread::get_id();
  if (breaks(other, "capture-thread", "a capture ends in another thread than it began in")) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  auto capture = std::move(stream->capture);
  if (breaks(capture->spoiled, "capture-spoiled", "a call that was refused has spoiled the capture")) {
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  auto* made = new Graph{std::move(capture->nodes)};
  graphs.insert(made);
  *graph = (CUgraph)made;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  ENTER(context);
  auto* stream = stream_of(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  bool spoiled = stream->capture != nullptr && stream->capture->spoiled;
  *status = stream->capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
            : spoiled                  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                       : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  ENTER(context);
  MAY_WAIT(context->device, "cuGraphInstantiate");
  if (flags != 0 || graphs.count((Graph*)graph) == 0) return CUDA_ERROR_INVALID_VALUE;
  auto* made = new Graph(*(Graph*)graph);
  executables.insert(made);
  *executable = (CUgraphExec)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  ENTER(context);
  return take(graphs, (Graph*)graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  ENTER(context);
  return take(executables, (Graph*)executable) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  ENTER(context);
  auto* graph = (Graph*)executable;
  bool alive = executables.count(graph) != 0;
  if (breaks(!alive, "graph-alive", "a graph that was destroyed is launched")) return CUDA_ERROR_INVALID_VALUE;
  if (!alive) return CUDA_SUCCESS;
  for (const Work& node : graph->nodes) {
    if (CUresult code = queue(stream, node); code != CUDA_SUCCESS) return code;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
