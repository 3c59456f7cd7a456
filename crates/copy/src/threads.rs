//! The threads that copies run on.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

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

    /// Runs `job` for every index below `jobs`, spread over the threads.
    pub(crate) fn for_each(&self, jobs: usize, job: impl Fn(usize) + Sync) {
        let (job, next) = (&job, &AtomicUsize::new(0));
        match &self.pool {
            Some(pool) if jobs > 1 => pool.scope(|scope| {
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
