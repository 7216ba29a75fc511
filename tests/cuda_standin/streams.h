/* What streams hold, for those who queue work and those who capture it. */
#pragma once

#include <deque>
#include <set>
#include <thread>
#include <vector>

#include "standin.h"

namespace standin {

/* Run any number of times: a graph repeats it. */
struct Work {
  bool kernel;
  std::function<void()> run;
};

struct Capture {
  CUstreamCaptureMode mode;
  std::thread::id thread;
  bool spoiled = false;
  std::vector<Work> nodes;
};

struct Stream {
  int device;
  bool blocking; /* waits for the default stream, and the default stream for it */
  std::deque<Work> queue; /* the one that runs is at the front */
  bool stop = false;
  std::thread thread;
  std::unique_ptr<Capture> capture; /* what is queued goes there */
};

/* Those that are alive. */
extern std::set<Stream*>& streams;
/* The stream, if it is one. */
Stream* stream_of(CUstream stream);
/* Queues work, or captures it. */
CUresult queue(CUstream stream, Work work);
/* A capturing stream cannot be asked or waited for. */
CUresult may_ask(Stream* stream, const char* call);

}  // namespace standin
