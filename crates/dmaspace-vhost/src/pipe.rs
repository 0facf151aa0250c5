//! A pipe of the front end that is written to instead of an event.
//!
//! User-Mode Linux is called by pipes. No call writes to a pipe that never waits: the flag is the open file's, which the
//! front end has, too; `pwritev2` with `RWF_NOWAIT` takes pipes only since Linux 6.4, and also waits for the pipe's mutex, which a
//! writer holds while its own memory is brought in. So a thread writes, which may stay behind, blocked, when the front end
//! has gone. What is to be written comes by an event of this side.
//!
//! At most 64 of these threads are in the process. A front end that brings one more pipe is left; events are not bounded.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use hostmem::PeerFile;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// The most threads.
const MOST: usize = 64;

/// Threads at work.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// A pipe with its thread, which ends with this unless it is blocked.
pub(super) struct Pipe {
    shared: Arc<Shared>,
}

struct Shared {
    event: OwnedFd,
    ended: AtomicBool,
}

/// A thread that is counted.
struct Counted;

impl Counted {
    fn new() -> io::Result<Self> {
        let more = |threads| (threads < MOST).then_some(threads + 1);
        let counted = THREADS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let full =
            |threads| io::Error::other(format!("{threads} pipes of front ends are written to"));
        counted.map(|_| Self).map_err(full)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pipe {
    /// Writes to `pipe` whenever [the event](Self::event) was raised.
    ///
    /// # Errors
    ///
    /// When there is no thread or descriptor for it.
    pub(super) fn new(pipe: PeerFile) -> io::Result<Self> {
        let counted = Counted::new()?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ended = AtomicBool::new(false);
        let shared = Arc::new(Shared { event, ended });
        let of_thread = shared.clone();
        let write = move || {
            let _counted = counted;
            of_thread.write(&pipe);
        };
        thread::Builder::new().spawn(write)?;
        Ok(Self { shared })
    }

    /// The event that the back end raises.
    pub(super) fn event(&self) -> io::Result<OwnedFd> {
        self.shared.event.try_clone()
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        // A counter that is full wakes it, too.
        let _ = rustix::io::write(&self.shared.event, &1_u64.to_ne_bytes());
    }
}

impl Shared {
    fn write(&self, pipe: &PeerFile) {
        loop {
            let _ = poll(
                &mut [PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN)],
                None,
            );
            let raised = rustix::io::read(&self.event, &mut [0; 8]).is_ok();
            if self.ended.load(Ordering::Acquire) {
                return;
            }
            if raised {
                // A full one has something to be read already, and a reader that has gone needs nothing.
                let _ = rustix::io::write(pipe, &1_u64.to_ne_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::time::{Duration, Instant};

    use super::*;

    fn wait_for(threads: usize) {
        let deadline = Instant::now() + Duration::from_secs(300);
        while THREADS.load(Ordering::Relaxed) != threads {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn pipes_have_a_thread_each_up_to_a_limit_and_none_waits_for_one_that_blocks() {
        let mut readers = Vec::new();
        let mut pipes = Vec::new();
        for _ in 0..MOST {
            let (reader, mut writer) = io::pipe().unwrap();
            rustix::io::ioctl_fionbio(&writer, true).unwrap();
            while writer.write(&[0; 4096]).is_ok() {}
            rustix::io::ioctl_fionbio(&writer, false).unwrap();
            let pipe = Pipe::new(writer.into()).unwrap();
            rustix::io::write(pipe.event().unwrap(), &1_u64.to_ne_bytes()).unwrap();
            readers.push(reader);
            pipes.push(pipe);
        }
        let (mut reader, writer) = io::pipe().unwrap();
        let refused = Pipe::new(writer.try_clone().unwrap().into());
        let refused = refused.err().unwrap().to_string();
        assert_eq!(refused, "64 pipes of front ends are written to");
        // They go with their pipes, now or when these have gone.
        drop(pipes);
        drop(readers);
        wait_for(0);
        let pipe = Pipe::new(writer.into()).unwrap();
        for _ in 0..2 {
            rustix::io::write(pipe.event().unwrap(), &1_u64.to_ne_bytes()).unwrap();
            let mut called = [0; 8];
            reader.read_exact(&mut called).unwrap();
            assert_eq!(u64::from_ne_bytes(called), 1);
        }
        drop(pipe);
        wait_for(0);
    }
}
