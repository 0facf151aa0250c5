//! The host, which plays the devices behind an IOMMU that QEMU knows nothing of: it is asked on the port
//! of the results, and does the DMA through the tables that the kernel has had it make.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
};

use anyhow::{Context as _, bail, ensure};
use guest::{
    console::Line,
    machines::{Machine, Unit, bdf},
    start::{RESULTS, word},
};
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};

/// The machine that this is, by the kernel's command line.
pub(crate) fn machine() -> anyhow::Result<&'static Machine> {
    let words = fs::read_to_string("/proc/cmdline")?;
    let name = word(&words, "dmaspace.machine").context("the command line names no machine")?;
    Machine::find(name).with_context(|| format!("there is no machine {name}"))
}

/// The port of the results.
fn port() -> anyhow::Result<File> {
    let options = OpenOptions::new().read(true).write(true).open(RESULTS);
    options.context(RESULTS)
}

/// Has the host keep a file.
pub(crate) fn keep(file: &str, text: &str) -> anyhow::Result<()> {
    let mut port = port()?;
    for line in text.lines() {
        writeln!(port, "{}", Line::Keep(file.to_owned(), line.to_owned()))?;
    }
    tcdrain(&port)?;
    Ok(())
}

/// Asks the host; its answer.
fn ask(question: String) -> anyhow::Result<String> {
    let port = port()?;
    // Otherwise the answer is sent back to the host.
    let mut how = tcgetattr(&port)?;
    how.make_raw();
    tcsetattr(&port, OptionalActions::Now, &how)?;
    let mut reader = BufReader::new(port.try_clone()?);
    writeln!({ port }, "{}", Line::Ask(question))?;
    let mut answer = String::new();
    reader.read_line(&mut answer)?;
    Ok(answer.trim_end().to_owned())
}

/// Outcome of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// All of it was done.
    Done,
    /// It ended at this address.
    Fault(u64),
}

/// A device whose DMA the host does, with a buffer of its own: what it read last, and zeros behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Endpoint(u16);

impl Endpoint {
    /// The device at `address`.
    pub(crate) fn at(address: &str) -> anyhow::Result<Self> {
        Ok(Self(bdf(address).context("no address")?))
    }

    /// The device at `address`, on a machine whose host does the DMA.
    pub(crate) fn of_this_machine(address: &str) -> anyhow::Result<Option<Self>> {
        let virtio = machine()?.unit == Unit::Virtio;
        virtio.then(|| Self::at(address)).transpose()
    }

    /// The number by which the kernel's driver calls it.
    pub(crate) const fn number(self) -> u16 {
        self.0
    }

    /// Reads `len` bytes at `iova` into its buffer.
    pub(crate) fn read(self, iova: u64, len: u64) -> anyhow::Result<Transfer> {
        self.transfer("read", iova, len)
    }

    /// Writes the first `len` bytes of its buffer to `iova`.
    pub(crate) fn write(self, iova: u64, len: u64) -> anyhow::Result<Transfer> {
        self.transfer("write", iova, len)
    }

    fn transfer(self, what: &str, iova: u64, len: u64) -> anyhow::Result<Transfer> {
        let answer = ask(format!("{what} {:x} {iova:x} {len:x}", self.0))?;
        match answer.split_once(' ') {
            None if answer == "done" => Ok(Transfer::Done),
            Some(("fault", at)) => Ok(Transfer::Fault(u64::from_str_radix(at, 16)?)),
            _ => bail!("the host says: {answer}"),
        }
    }
}

/// Totals of the host's IOMMU, over all devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Domains.
    pub(crate) domains: u64,
    /// Mappings, each of one request of the kernel's.
    pub(crate) mappings: u64,
    /// Bytes that are mapped.
    pub(crate) mapped: u64,
    /// Bytes of the guest's memory that are charged, each once.
    pub(crate) charged: u64,
    /// Pages of tables.
    pub(crate) tables: u64,
}

/// Asks the host for its totals.
pub(crate) fn held() -> anyhow::Result<Held> {
    let answer = ask("held".into())?;
    let numbers: Result<Vec<u64>, _> = answer.split(' ').map(str::parse).collect();
    let Ok(&[domains, mappings, mapped, charged, tables]) = numbers.as_deref() else {
        bail!("the host says: {answer}");
    };
    Ok(Held {
        domains,
        mappings,
        mapped,
        charged,
        tables,
    })
}

/// The guest's memory, as the host has it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ram {
    /// Memory that the host holds pages for.
    pub(crate) there: u64,
    /// Memory in the balloon.
    pub(crate) actual: u64,
    /// Free memory that the driver has reported, each time it did.
    pub(crate) reported: u64,
    /// Memory that was to be given back while a domain had it mapped.
    pub(crate) kept: u64,
}

/// Asks the host for the guest's memory.
pub(crate) fn ram() -> anyhow::Result<Ram> {
    let answer = ask("ram".into())?;
    let numbers: Result<Vec<u64>, _> = answer.split(' ').map(str::parse).collect();
    let Ok(&[there, actual, reported, kept]) = numbers.as_deref() else {
        bail!("the host says: {answer}");
    };
    Ok(Ram {
        there,
        actual,
        reported,
        kept,
    })
}

/// Has the host want so many bytes in the balloon.
pub(crate) fn balloon(bytes: u64) -> anyhow::Result<()> {
    let answer = ask(format!("balloon {bytes}"))?;
    ensure!(answer == "done", "the host says: {answer}");
    Ok(())
}

/// Looks whether a transfer came to where it should.
pub(crate) fn expect(found: Transfer, right: Transfer) -> anyhow::Result<()> {
    ensure!(found == right, "{found:?} and not {right:?}");
    Ok(())
}
