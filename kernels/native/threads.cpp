// The team: threads that are started when first needed, wait for jobs, and end with the process.
#include "threads.hpp"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire {

namespace {

int current_processor() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// A worker that woke up where the caller runs would only take its time: it goes to another processor, if there is one.
void leave_processor([[maybe_unused]] int processor) {
#if defined(__linux__)
    cpu_set_t allowed;
    if (processor < 0 || sched_getcpu() != processor || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    cpu_set_t others = allowed;
    CPU_CLR(static_cast<size_t>(processor), &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
    sched_setaffinity(0, sizeof(allowed), &allowed);
#endif
}

// Asks for short turns, which Linux from 6.12 on grants soon: OpenMP's threads, torch's among them, spin for
// milliseconds after their work, and whoever is woken to a long turn waits for that to end.
void ask_for_short_turns() {
#if defined(__linux__) && defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes{};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 || attributes.policy != SCHED_OTHER)
        return;
    attributes.runtime = 100'000;  // nanoseconds
    syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// A job that is under way; it lies on its caller's stack, and all but `next` and `failed` is the team's to guard.
struct Job {
    const Shares& shares;
    const Task task;
    const void* const work;
    const int processor = current_processor();
    std::fenv_t
        arithmetic{};  // of the caller, whether small numbers are flushed to zero included; the workers take it on
    int64_t joined = 1, inside = 0;  // workers that ever joined, the caller included; those still here, without it
    std::exception_ptr error{};
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    bool open() const { return joined < shares.threads && next.load(std::memory_order_relaxed) < shares.parts; }

    void take_parts(int64_t worker) {
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < shares.parts;)
            if (!failed.load(std::memory_order_relaxed)) task(work, part, worker);
    }
};

// Held while a thread is started, and during a fork: a child forked in between would have the C library's locks as held.
std::mutex starting;

class Team {
  public:
    void run(Job& job) {
        offer(job);
        take_parts(job, 0);
        std::unique_lock<std::mutex> lock(mutex_);
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        left_.wait(lock, [&] { return job.inside == 0; });
    }

  private:
    void offer(Job& job) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            jobs_.push_back(&job);
            while (workers_ < job.shares.threads - 1 && start_worker()) ++workers_;
        }
        for (int64_t helper = 1; helper < job.shares.threads; ++helper) wake_.notify_one();
    }

    void take_parts(Job& job, int64_t worker) {
        try {
            job.take_parts(worker);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
    }

    // False where the system grants no more threads: those there are do the work. Signals are the other threads'
    // business.
    bool start_worker() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            const std::lock_guard<std::mutex> lock(starting);
            std::thread([this] { serve(); }).detach();
        } catch (const std::exception&) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    [[noreturn]] void serve() {
        ask_for_short_turns();
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
            const int64_t worker = job->joined++;
            ++job->inside;
            lock.unlock();
            leave_processor(job->processor);
            std::fesetenv(&job->arithmetic);
            take_parts(*job, worker);
            lock.lock();
            if (--job->inside == 0) left_.notify_all();
        }
    }

    Job* open_job() const {
        const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->open(); });
        return found == jobs_.end() ? nullptr : *found;
    }

    std::mutex mutex_;
    std::condition_variable wake_, left_;
    std::vector<Job*> jobs_;  // the oldest first
    int64_t workers_ = 0;
};

// Never destroyed: its threads may outlive all else. After a fork they are the parent's, so the child begins anew.
std::atomic<Team*> current_team{nullptr};
[[maybe_unused]] const int forked = pthread_atfork([] { starting.lock(); }, [] { starting.unlock(); },
                                                   [] {
                                                       starting.unlock();
                                                       current_team.store(nullptr);
                                                   });

Team& team() {
    Team* found = current_team.load();
    if (found) return *found;
    auto fresh = std::make_unique<Team>();
    return current_team.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
}

}  // namespace

void run_parts(const Shares& shares, Task task, const void* work) {
    if (shares.threads == 1) {
        for (int64_t part = 0; part < shares.parts; ++part) task(work, part, 0);
        return;
    }
    Job job{shares, task, work};
    std::fegetenv(&job.arithmetic);
    team().run(job);
    if (job.error) std::rethrow_exception(job.error);
}

}  // namespace gradwire
