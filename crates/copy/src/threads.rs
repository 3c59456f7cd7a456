//! The threads that copies run on.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Up to this, a second thread costs more to wake than it saves.
const ALONE_BYTES: usize = 512 << 10;

/// A set of worker threads, made once and reused: waking a thread costs less than starting one.
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
    count: usize,
}

impl Threads {
    /// `count` threads; 0 takes all cores. With one thread, work runs on the caller's.
    pub fn new(count: usize) -> Threads {
        let count = match count {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let pool = (count > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(count)
                    .thread_name(|i| format!("kvbaton-copy-{i}"))
                    .build()
            })
            // Where threads cannot be started, copies run on the caller's.
            .and_then(Result::ok);
        let count = if pool.is_some() { count } else { 1 };
        Threads { pool, count }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether so many bytes are worth waking other threads for.
    pub(crate) fn share(&self, bytes: usize) -> bool {
        self.count > 1 && bytes > ALONE_BYTES
    }

    /// Runs `job`, which handles `bytes` in all, for every index below `jobs`: spread over the threads, or on the
    /// caller's where the bytes are few.
    pub(crate) fn for_each(&self, jobs: usize, bytes: usize, job: impl Fn(usize) + Sync) {
        let (job, next) = (&job, &AtomicUsize::new(0));
        match &self.pool {
            Some(pool) if jobs > 1 && self.share(bytes) => pool.scope(|scope| {
                for _ in 0..self.count.min(jobs) {
                    scope.spawn(move |_| {
                        loop {
                            let i = next.fetch_add(1, Ordering::Relaxed);
                            if i >= jobs {
                                return;
                            }
                            job(i);
                        }
                    });
                }
            }),
            _ => (0..jobs).for_each(job),
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::thread::{ThreadId, current};

    use super::*;

    fn runners(threads: &Threads, bytes: usize) -> (HashSet<ThreadId>, usize) {
        let seen = Mutex::new((HashSet::new(), 0));
        threads.for_each(64, bytes, |_| {
            let mut seen = seen.lock().unwrap();
            seen.0.insert(current().id());
            seen.1 += 1;
        });
        seen.into_inner().unwrap()
    }

    #[test]
    fn few_bytes_stay_on_the_callers_thread() {
        let (ids, jobs) = runners(&Threads::new(2), ALONE_BYTES);
        assert_eq!((ids, jobs), (HashSet::from([current().id()]), 64));
    }

    #[test]
    fn many_bytes_go_to_the_workers() {
        let (ids, jobs) = runners(&Threads::new(2), ALONE_BYTES + 1);
        assert!(!ids.contains(&current().id()));
        assert_eq!(jobs, 64);
    }
}
