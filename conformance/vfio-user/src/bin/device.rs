//! A device in a process of its own: a disk, or a DMA engine.
//!
//! It serves one client after the other, and says on its output what each of them did.

use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use device_rig::disk::{self, Disk, Interrupts};
use device_rig::engine::{self, Engine};
use dmaspace_vfio_user::{ClientLimits, Description, DeviceModel, Server};

/// A PCI device for QEMU's vfio-user-pci.
#[derive(Parser)]
struct Options {
    /// Where clients connect.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    #[command(subcommand)]
    device: Kind,
}

#[derive(Subcommand)]
enum Kind {
    /// virtio's block device over a file.
    Disk {
        /// The file.
        #[arg(long, value_name = "PATH")]
        file: PathBuf,
        /// How many queues it has.
        #[arg(long, value_name = "NUMBER", default_value_t = 2)]
        queues: u16,
        /// Interrupts by a line instead of messages.
        #[arg(long)]
        intx: bool,
    },
    /// An engine that reads and writes a word of memory.
    Engine,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    // An access to memory that a client has taken away ends its connection, and not the program.
    hostmem::ShrinkWatch::install()?;
    match std::fs::remove_file(&options.socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(&options.socket);
    let listener = listener.with_context(|| options.socket.display().to_string())?;
    let server =
        |description: Description| Server::new(listener, description, ClientLimits::default());
    match options.device {
        Kind::Disk { file, queues, intx } => {
            let interrupts = if intx {
                Interrupts::Intx
            } else {
                Interrupts::Msix
            };
            let server = server(disk::description(queues, interrupts))?;
            let (memory, irqs) = (server.memory().clone(), server.irqs().clone());
            let disk = Disk::new(&file, queues, interrupts, memory, irqs);
            let disk = disk.with_context(|| file.display().to_string())?;
            serve(&server, &disk, || {
                let (requests, gathered) = disk.counts();
                format!(", {requests} disk requests, {gathered} gathered")
            })
        }
        Kind::Engine => {
            let server = server(engine::description())?;
            let engine = Engine::new(server.memory().clone());
            serve(&server, &engine, String::new)
        }
    }
}

fn serve(
    server: &Server,
    device: &dyn DeviceModel,
    more: impl Fn() -> String,
) -> anyhow::Result<()> {
    println!("ready");
    loop {
        let begun = Instant::now();
        let served = server.serve(device)?;
        println!(
            "left: {} requests, {} maps, {} unmaps, {} refused, {} ms{}",
            served.requests,
            served.maps,
            served.unmaps,
            served.refused,
            begun.elapsed().as_millis(),
            more()
        );
        if let Err(error) = &served.end {
            println!("ended: {error:?}");
        }
        let left = server.memory().counts();
        println!(
            "kept: {} maps, {} files, {} tables",
            left.maps, left.files, left.tables
        );
    }
}
