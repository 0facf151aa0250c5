//! A QEMU of our own: its process and what it says.

use std::{
    collections::VecDeque,
    io::Read as _,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::error::Error;

/// Bytes kept of the end of what QEMU says.
const KEPT: usize = 4096;

/// How long a QEMU that has closed the connection may take to end, and its last words to arrive.
const ENDING: Duration = Duration::from_secs(1);

/// QEMU while it runs; killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    said: Arc<Mutex<VecDeque<u8>>>,
    /// Reads what QEMU says, and ends with it.
    listener: thread::JoinHandle<()>,
}

impl Process {
    /// Starts QEMU, and yields the connection to its qtest server.
    pub(crate) fn start(mut command: Command) -> Result<(Self, UnixStream), Error> {
        let program = command.get_program().to_string_lossy().into_owned();
        let failed = |source| Error::Start { program, source };
        // A socket in the place of the standard streams: unlike pipes it knows time limits.
        let mut connected = || {
            let (ours, theirs) = UnixStream::pair()?;
            command
                .args(["-display", "none", "-qtest", "stdio", "-qtest-log", "none"])
                .stdin(OwnedFd::from(theirs.try_clone()?))
                .stdout(OwnedFd::from(theirs))
                .stderr(Stdio::piped());
            Ok((command.spawn()?, ours))
        };
        let (mut child, stream) = connected().map_err(failed)?;
        // It holds the other end, whose closing is to tell that QEMU is gone.
        drop(command);
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let stderr = child.stderr.take();
        let listener = thread::spawn({
            let said = said.clone();
            move || {
                let mut bytes = [0; 1024];
                let Some(mut stderr) = stderr else { return };
                while let Ok(count @ 1..) = stderr.read(&mut bytes) {
                    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    said.extend(&bytes[..count]);
                    let excess = said.len().saturating_sub(KEPT);
                    said.drain(..excess);
                }
            }
        });
        let process = Self {
            child,
            said,
            listener,
        };
        Ok((process, stream))
    }

    /// How QEMU ended, if it does so soon.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().ok().flatten();
            let over = status.is_some() && self.listener.is_finished();
            if over || start.elapsed() > ENDING {
                return status;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The end of what it said on its standard error.
    pub(crate) fn said(&self) -> String {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(said.make_contiguous()).into_owned()
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
