//! Two threads at known places: one that has stopped in a callback, and another that has come to its end or waits.

use std::fs;
use std::sync::{Mutex, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use ioas::{Observer, Step};

/// Has a thread that was stopped go on, at the latest when it is dropped.
pub(crate) struct Stopped {
    came: mpsc::Receiver<()>,
    go: mpsc::Sender<()>,
}

/// A callback in which the first thread that comes stops; later ones pass. Returns whether it has stopped.
pub(crate) fn stop() -> (impl Fn() -> bool + Send + Sync + 'static, Stopped) {
    let (comes, came) = mpsc::channel();
    let (go, goes) = mpsc::channel();
    let first = Mutex::new(Some((comes, goes)));
    let pass = move || {
        let ends = first.lock().unwrap().take();
        if let Some((comes, goes)) = &ends {
            let _ = comes.send(());
            // An error: the test has failed meanwhile.
            let _ = goes.recv();
        }
        ends.is_some()
    };
    (pass, Stopped { came, go })
}

impl Stopped {
    /// Waits until a thread has stopped.
    pub(crate) fn wait(&self) {
        let come = self.came.recv_timeout(Duration::from_secs(300));
        come.unwrap();
    }

    pub(crate) fn go(self) {
        let _ = self.go.send(());
    }
}

/// Calls something when a step begins.
pub(crate) struct Before<F>(pub(crate) Step, pub(crate) F);

impl<F: Fn() -> bool> Observer for Before<F> {
    fn begin(&mut self, step: Step) {
        if step == self.0 {
            (self.1)();
        }
    }
}

/// Has a thread do `work`, and returns when it has done it or waits for another thread.
pub(crate) fn beside<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let (named, name) = mpsc::channel();
    let thread = scope.spawn(move || {
        let _ = named.send(fs::read_link("/proc/thread-self").unwrap());
        work()
    });
    let task = name.recv().unwrap();
    let begun = Instant::now();
    // Seen twice, so that it is no wait for an allocator or the like.
    let mut waits = 0;
    while !thread.is_finished() && waits < 2 {
        assert!(begun.elapsed() < Duration::from_secs(300), "{task:?} works");
        let stat = fs::read_to_string(format!("/proc/{}/stat", task.display()));
        let sleeps = stat.is_ok_and(|stat| stat.contains(") S "));
        // Locks without `std` spin: then this is all that can be done.
        let spins = cfg!(not(feature = "std")) && begun.elapsed() > Duration::from_millis(100);
        waits = if sleeps || spins { waits + 1 } else { 0 };
        thread::sleep(Duration::from_millis(1));
    }
    thread
}
