//! A PCI device in a process of its own, and a client that does what a monitor does.
//!
//! For authors of device models; `docs/guides/device.md` leads through it. The device has a thread here instead of a process,
//! and the client is that of the crate `vfio_user`, by which a device is tested without a virtual machine.
//!
//!     cargo run -p dmaspace-examples --example device

use std::error::Error as _;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use dmaspace::ShrinkWatch;
use dmaspace::vfio_user::{
    ClientLimits, ClientMemory, Description, DeviceModel, RequestRefusal, Server,
};
use vm_memory::{Bytes as _, GuestAddress};

/// Registers of region 0. The driver writes where in memory it wants to have the number, 8 bytes.
const ADDRESS: u64 = 8;
/// And reads here, 4 bytes, whether it is there: 1 if it could not be written.
const FAILED: u64 = 16;
const NUMBER: u32 = 42;

struct Number {
    memory: Arc<ClientMemory>,
    failed: AtomicBool,
}

impl DeviceModel for Number {
    fn read(&self, region: usize, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        if let (0, FAILED, [first, ..]) = (region, offset, bytes) {
            *first = self.failed.load(Ordering::Relaxed).into();
        }
        Ok(())
    }

    fn write(&self, region: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (0, ADDRESS, Ok(at)) = (region, offset, bytes.try_into()) else {
            return Err(io::Error::other("no such register"));
        };
        let at = GuestAddress(u64::from_le_bytes(at));
        let done = self.memory.view().write_obj(NUMBER, at);
        self.failed.store(done.is_err(), Ordering::Relaxed);
        self.memory
            .drain_faults(&mut |fault| println!("fault {fault}"));
        Ok(())
    }

    fn reset(&self) {
        self.failed.store(false, Ordering::Relaxed);
    }

    fn refused(&self, command: u16, refusal: &RequestRefusal) {
        let mut line = format!("refused command {command}: {refusal}");
        let mut cause = refusal.source();
        while let Some(error) = cause {
            line += &format!(": {error}");
            cause = error.source();
        }
        println!("{line}");
    }
}

fn main() -> anyhow::Result<()> {
    // An access to memory that a client has taken away finds zeros, and ends the connection.
    ShrinkWatch::install()?;
    let place = tempfile::tempdir()?;
    let socket = place.path().join("number.sock");
    let listener = UnixListener::bind(&socket)?;
    let mut description = Description::default();
    description.regions[0] = 4096;
    let server = Server::new(listener, description, ClientLimits::default())?;
    let device = Number {
        memory: server.memory().clone(),
        failed: AtomicBool::new(false),
    };
    let monitor = std::thread::spawn(move || monitor::run(&socket));

    // One client. A process would go on with the next.
    let served = server.serve(&device)?;
    println!("{} requests, {} refused", served.requests, served.refused);
    if let Err(why) = served.end {
        println!("the connection ended: {:#}", anyhow!(why));
    }
    let done = monitor.join();
    done.map_err(|_| anyhow!("the client panicked"))?
}

/// Calls of a monitor and of its guest's driver.
mod monitor {
    use std::os::fd::AsRawFd as _;
    use std::path::Path;
    use std::sync::atomic::Ordering;

    use anyhow::{Context as _, ensure};
    use dmaspace::{Backing, Mapping};
    use vfio_user::Client;

    use super::{ADDRESS, FAILED, NUMBER};

    pub(super) fn run(socket: &Path) -> anyhow::Result<()> {
        let mut client = Client::new(socket)?;
        // Memory of 2 MiB at 1 MiB, and a number wanted in it, then outside of it.
        let ram = Mapping::new(Backing::Memfd, 2 << 20, None)?;
        let file = ram.fd().context("no file")?.as_raw_fd();
        client.dma_map(0, 1 << 20, ram.len(), file)?;
        for (at, fails) in [(0x10_1000_u64, 0), (0x90_0000, 1)] {
            client.region_write(0, ADDRESS, &at.to_le_bytes())?;
            let mut failed = [0; 4];
            client.region_read(0, FAILED, &mut failed)?;
            ensure!(u32::from_le_bytes(failed) == fails);
        }
        let found = ram.cells()[0x1000 / 8].load(Ordering::Relaxed);
        ensure!(found.to_ne_bytes()[..4] == NUMBER.to_le_bytes());
        Ok(client.shutdown()?)
    }
}
