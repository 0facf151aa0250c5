//! A machine and the commands that work it.

use std::{
    os::unix::net::UnixStream,
    path::Path,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    error::{Error, shown},
    irq::Irq,
    link::Link,
    process::Process,
    wire,
};

/// How long a QEMU may take to start, and for an answer unless
/// [something else is said](Machine::with_patience): many times what it needs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The most bytes in one command or answer. QEMU looks through what it has of a command each time that
/// another kilobyte comes.
const CHUNK: usize = 64 << 10;

/// A machine of QEMU.
///
/// Commands may come from any thread; each waits for the one before. Addresses are what the machine's
/// first processor calls physical ones. The names are those of the protocol: `b`, `w`, `l` and `q` are
/// 1, 2, 4 and 8 bytes. Reads of an address without memory or device have the result that QEMU gives
/// them.
///
/// # Errors
///
/// Every command fails as [`Error`] says.
#[derive(Debug)]
pub struct Machine {
    link: Mutex<Link>,
    patience: Duration,
}

/// Starting and asking.
impl Machine {
    /// Starts `qemu`, a program and the arguments that describe its machine, with a qtest server on its
    /// standard streams and without a display, and waits until it answers. By then it has read the
    /// files that it was started with. It is killed when the `Machine` is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Start`] when there is no such program; [`Error::Died`] when QEMU does not like its
    /// arguments, with what it says.
    pub fn start(qemu: Command) -> Result<Self, Error> {
        let (process, stream) = Process::start(qemu)?;
        Self::greet(Link::new(stream, Some(process)))
    }

    /// Connects to a QEMU that was started elsewhere with `-qtest unix:PATH,server=on,wait=off`,
    /// and that lives on.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when no process listens there.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(path).map_err(|source| Error::Connect {
            path: path.display().to_string(),
            source,
        })?;
        Self::over(stream)
    }

    /// The machine at the other end of `stream`.
    pub fn over(stream: UnixStream) -> Result<Self, Error> {
        Self::greet(Link::new(stream, None))
    }

    /// Asks something harmless, to which only a machine that is complete answers.
    fn greet(link: Link) -> Result<Self, Error> {
        let machine = Self {
            link: Mutex::new(link),
            patience: PATIENCE,
        };
        machine.command("endianness")?;
        Ok(machine)
    }

    /// From now on, a command takes no longer than `patience`.
    pub const fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sends any command, one line without its end, and yields what its answer says after `OK`.
    pub fn command(&self, command: &str) -> Result<String, Error> {
        self.link().command(command, self.patience)
    }

    /// The end of what QEMU said on its standard error so far, where it was started by us.
    pub fn said(&self) -> String {
        let link = self.link();
        link.process.as_ref().map(Process::said).unwrap_or_default()
    }

    /// QEMU's process, where it was started by us.
    pub fn process_id(&self) -> Option<u32> {
        self.link().process.as_ref().map(Process::id)
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        // A thread that panicked left the link out of step, which the link has noted.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command without a result.
    fn order(&self, command: &str) -> Result<(), Error> {
        self.command(command)?;
        Ok(())
    }

    /// A command whose result is a number that fits.
    fn number<T: TryFrom<u64>>(&self, command: &str) -> Result<T, Error> {
        let answer = self.command(command)?;
        let number = wire::number(&answer).and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| no_answer(command, &answer))
    }
}

fn no_answer(command: &str, answer: &str) -> Error {
    Error::Garbled {
        command: shown(command),
        answer: shown(answer),
    }
}

/// A method for a command that reads a number, and one for its counterpart.
macro_rules! numbers {
    ($(
        $(#[$read_doc:meta])* $read:ident,
        $(#[$write_doc:meta])* $write:ident,
        $address:ty, $value:ty;
    )*) => {$(
        $(#[$read_doc])*
        pub fn $read(&self, address: $address) -> Result<$value, Error> {
            self.number(&format!("{} {address:#x}", stringify!($read)))
        }

        $(#[$write_doc])*
        pub fn $write(&self, address: $address, value: $value) -> Result<(), Error> {
            self.order(&format!("{} {address:#x} {value:#x}", stringify!($write)))
        }
    )*};
}

/// Memory and registers.
impl Machine {
    numbers! {
        /// Reads a byte at an address.
        readb, /// Writes a byte at an address.
        writeb, u64, u8;
        /// Reads 2 bytes at an address.
        readw, /// Writes 2 bytes at an address.
        writew, u64, u16;
        /// Reads 4 bytes at an address.
        readl, /// Writes 4 bytes at an address.
        writel, u64, u32;
        /// Reads 8 bytes at an address.
        readq, /// Writes 8 bytes at an address.
        writeq, u64, u64;
    }

    /// Fills `bytes` from memory at `address`.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let mut at = address;
        for chunk in bytes.chunks_mut(CHUNK) {
            let command = format!("b64read {at:#x} {:#x}", chunk.len());
            let answer = self.command(&command)?;
            wire::decode(&answer, chunk).ok_or_else(|| no_answer(&command, &answer))?;
            at = at.wrapping_add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Writes `bytes` to memory at `address`.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut at = address;
        for chunk in bytes.chunks(CHUNK) {
            let mut command = format!("b64write {at:#x} {:#x} ", chunk.len());
            wire::encode(chunk, &mut command);
            self.order(&command)?;
            at = at.wrapping_add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Sets `len` bytes of memory at `address` to `value`. QEMU takes as much memory for it.
    pub fn memset(&self, address: u64, len: u64, value: u8) -> Result<(), Error> {
        self.order(&format!("memset {address:#x} {len:#x} {value:#x}"))
    }
}

/// Ports.
impl Machine {
    numbers! {
        /// Reads a byte from a port.
        inb, /// Writes a byte to a port.
        outb, u16, u8;
        /// Reads 2 bytes from a port.
        inw, /// Writes 2 bytes to a port.
        outw, u16, u16;
        /// Reads 4 bytes from a port.
        inl, /// Writes 4 bytes to a port.
        outl, u16, u32;
    }
}

/// The virtual clock; times are nanoseconds. Refused unless [it is ours](Self::clock_is_ours).
impl Machine {
    /// True when the clock stands until we move it: under QEMU's accelerator `qtest`.
    pub fn clock_is_ours(&self) -> Result<bool, Error> {
        match self.command("clock_set 0") {
            Ok(_) => Ok(true),
            // Newer ones refuse to set it back, and then say what time it is.
            Err(Error::Refused { answer, .. }) => Ok(wire::number(&answer).is_some()),
            Err(error) => Err(error),
        }
    }

    /// Moves the clock by `by`, and yields the time.
    pub fn clock_step(&self, by: u64) -> Result<u64, Error> {
        self.number(&format!("clock_step {by}"))
    }

    /// Moves the clock to the next deadline of a timer, and yields the time.
    pub fn clock_step_to_next(&self) -> Result<u64, Error> {
        self.number("clock_step")
    }

    /// Moves the clock to `to`, unless that is past, and yields the time.
    pub fn clock_set(&self, to: u64) -> Result<u64, Error> {
        self.number(&format!("clock_set {to}"))
    }
}

/// Interrupt lines. A device is named by its path in QEMU's object tree, as far as it is unambiguous:
/// `ioapic`.
impl Machine {
    /// From now on, tells of changes of the device's inputs. QEMU does so for one device only.
    pub fn irq_intercept_in(&self, device: &str) -> Result<(), Error> {
        self.order(&format!("irq_intercept_in {device}"))
    }

    /// From now on, tells of changes of the device's outputs. QEMU does so for one device only.
    pub fn irq_intercept_out(&self, device: &str) -> Result<(), Error> {
        self.order(&format!("irq_intercept_out {device}"))
    }

    /// Sets a device's input: `name` is that of the list of inputs, or `unnamed-gpio-in`.
    pub fn set_irq_in(&self, device: &str, name: &str, line: u8, level: i32) -> Result<(), Error> {
        self.order(&format!("set_irq_in {device} {name} {line} {level}"))
    }

    /// True when the line is raised, as far as QEMU has told up to the last answer.
    pub fn irq_raised(&self, line: u8) -> bool {
        self.link().lines.raised(line)
    }

    /// The next change of a line that is intercepted, in order, waiting for it no longer than
    /// `patience`. Only the newest 4,096 changes are kept. Commands of other threads wait meanwhile.
    pub fn wait_irq(&self, patience: Duration) -> Result<Option<Irq>, Error> {
        self.link().wait_irq(patience)
    }
}
