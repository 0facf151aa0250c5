//! The real QEMU. Where there is none (or none of that name: `QTEST_QEMU`), tests say that they are
//! skipped.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::{env, fs, io::ErrorKind, path::Path, process::Command, thread, time::Duration};

use qtest::{
    Error, HALT, Irq, Machine,
    edu::{self, Edu},
    nvme::{self, Data, Nvme, Ring, Status},
    pci::{self, Address, BarKind, Config, Window},
};
use tempfile::TempDir;

const EDU: Address = Address::new(0, 5, 0);
const ECAM: u64 = 0xb000_0000;
const WINDOW: Window = Window::new(0xc000_0000, 0x1000_0000);

fn program() -> String {
    env::var("QTEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into())
}

/// A q35 with `edu` and a halted processor.
fn q35(directory: &Path) -> Command {
    let firmware = directory.join("halt.bin");
    fs::write(&firmware, HALT).unwrap();
    let mut qemu = Command::new(program());
    qemu.args(["-nodefaults", "-no-user-config", "-machine", "q35"])
        .args([
            "-accel",
            "tcg",
            "-icount",
            "shift=0,sleep=off",
            "-m",
            "128M",
        ])
        .args(["-device", "edu,addr=5,dma_mask=0xffffffffffffffff"])
        .args(["-device", "virtio-serial-pci,addr=6"])
        .arg("-bios")
        .arg(firmware);
    qemu
}

/// The machine, unless there is no QEMU.
fn start(qemu: Command) -> Option<Machine> {
    match Machine::start(qemu) {
        Ok(machine) => Some(machine),
        Err(Error::Start { program, source }) if source.kind() == ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no {program}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn machine() -> Option<Machine> {
    let directory = TempDir::new().unwrap();
    start(q35(directory.path()))
}

#[test]
fn memory_is_read_and_written_in_every_width() {
    let Some(machine) = machine() else { return };
    machine.writeq(0x10_0000, 0x8877_6655_4433_2211).unwrap();
    assert_eq!(machine.readb(0x10_0001).unwrap(), 0x22);
    assert_eq!(machine.readw(0x10_0002).unwrap(), 0x4433);
    assert_eq!(machine.readl(0x10_0004).unwrap(), 0x8877_6655);
    machine.writeb(0x10_0000, 0xaa).unwrap();
    machine.writew(0x10_0002, 0xbbbb).unwrap();
    machine.writel(0x10_0004, 0xcccc_cccc).unwrap();
    assert_eq!(machine.readq(0x10_0000).unwrap(), 0xcccc_cccc_bbbb_22aa);
    // More than one command takes, of every length modulo 3.
    for len in [0, 1, 2, 3, 4096, (64 << 10) + 1, 200_000] {
        let bytes: Vec<u8> = (0..len).map(|i| ((i * i) >> 3) as u8).collect();
        let mut back = vec![0xee; len];
        machine.write(0x20_0003, &bytes).unwrap();
        machine.read(0x20_0003, &mut back).unwrap();
        assert!(bytes == back, "{len} bytes");
    }
    machine.memset(0x20_0010, 0x100, 0x5a).unwrap();
    let mut set = [0; 0x102];
    machine.read(0x20_000f, &mut set).unwrap();
    assert!(set[1..0x101].iter().all(|&byte| byte == 0x5a));
    assert!(set[0] != 0x5a && set[0x101] != 0x5a);
    machine.memset(0x20_0010, 0, 1).unwrap();
}

#[test]
fn ports_are_read_and_written_in_every_width() {
    let Some(machine) = machine() else { return };
    // The host bridge's identification, by the ports of configuration space.
    machine.outl(0xcf8, 0x8000_0000).unwrap();
    assert_eq!(machine.inl(0xcf8).unwrap(), 0x8000_0000);
    let id = machine.inl(0xcfc).unwrap();
    assert_eq!(id as u16, 0x8086);
    assert_eq!(machine.inw(0xcfc).unwrap(), 0x8086);
    assert_eq!(machine.inb(0xcfd).unwrap(), 0x80);
    // A byte of the battery-backed memory of the clock.
    machine.outb(0x70, 0x40).unwrap();
    machine.outb(0x71, 0xa5).unwrap();
    assert_eq!(machine.inb(0x71).unwrap(), 0xa5);
    // Command of edu.
    machine.outl(0xcf8, 0x8000_2804).unwrap();
    machine.outw(0xcfc, 6).unwrap();
    assert_eq!(machine.inw(0xcfc).unwrap(), 6);
}

#[test]
fn what_qemu_refuses_is_named_and_the_machine_goes_on() {
    let Some(machine) = machine() else { return };
    let error = machine.command("no_such_command 1").unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Refused { .. }), "{text}");
    assert!(
        text.contains("`no_such_command 1`: Unknown command"),
        "{text}"
    );
    let device = machine.irq_intercept_in("nobody");
    assert!(matches!(device, Err(Error::Refused { .. })));
    let two = machine.command("readb 0\nreadb 1");
    assert!(matches!(two, Err(Error::Command { .. })));
    assert_eq!(machine.command("endianness").unwrap(), "little");
}

#[test]
fn without_its_accelerator_the_clock_is_not_ours() {
    let Some(machine) = machine() else { return };
    assert!(!machine.clock_is_ours().unwrap());
    assert!(matches!(machine.clock_step(1), Err(Error::Refused { .. })));
}

/// Checks that the clock is ours if this QEMU has the accelerator for that.
#[test]
fn with_its_accelerator_the_clock_is_ours() {
    let directory = TempDir::new().unwrap();
    let mut qemu = q35(directory.path());
    let list = Command::new(program()).args(["-accel", "help"]).output();
    let has = list.is_ok_and(|list| String::from_utf8_lossy(&list.stdout).contains("qtest"));
    if !has {
        return eprintln!("SKIPPED: this QEMU has no accelerator qtest");
    }
    let arguments: Vec<_> = qemu.get_args().map(ToOwned::to_owned).collect();
    qemu = Command::new(program());
    let icount = arguments.iter().position(|word| word == "-icount").unwrap();
    for (nth, word) in arguments.iter().enumerate() {
        match nth {
            _ if nth == icount || nth == icount + 1 => {}
            _ if word == "tcg" => _ = qemu.arg("qtest"),
            _ => _ = qemu.arg(word),
        }
    }
    let machine = start(qemu).unwrap();
    assert!(machine.clock_is_ours().unwrap());
    let before = machine.clock_step(1000).unwrap();
    assert_eq!(machine.clock_step(1000).unwrap(), before + 1000);
    assert_eq!(machine.clock_set(before + 5000).unwrap(), before + 5000);
    copies(&machine);
}

#[test]
fn functions_are_found_by_ports_and_by_memory() {
    let Some(machine) = machine() else { return };
    let ports = Config::ports(&machine);
    let found = ports.functions(0).unwrap();
    let edu = found.iter().find(|found| found.address == EDU).unwrap();
    assert_eq!((edu.vendor, edu.device), (edu::VENDOR, edu::DEVICE));
    assert_eq!((edu.class, edu.header), (0x00_ff_00, 0));
    // The south bridge has several functions.
    assert!(found.iter().any(|f| f.address == Address::new(0, 31, 2)));
    assert!(found.iter().all(|f| f.address != Address::new(0, 7, 0)));
    let memory = Config::q35(&machine, ECAM).unwrap();
    assert_eq!(memory.functions(0).unwrap(), found);
    assert_eq!(memory.functions(1).unwrap(), []);
    assert!(matches!(
        Config::q35(&machine, ECAM + 0x1000),
        Err(pci::Error::Ecam { .. })
    ));
    // Only memory reaches beyond 256 bytes.
    assert!(memory.read32(EDU, 0x100).is_ok());
    for (config, offset) in [(ports, 0x100), (ports, 2), (memory, 0x1000), (memory, 6)] {
        let error = config.read32(EDU, offset).unwrap_err();
        assert!(matches!(error, pci::Error::Offset { .. }), "{error}");
    }
}

#[test]
fn base_addresses_are_sized_and_given() {
    let Some(machine) = machine() else { return };
    for config in [
        Config::ports(&machine),
        Config::q35(&machine, ECAM).unwrap(),
    ] {
        let mut window = WINDOW;
        let bars = config.assign(EDU, &mut window).unwrap();
        let [bar] = bars[..] else { panic!("{bars:?}") };
        assert_eq!((bar.index, bar.size), (0, 1 << 20));
        let memory = |wide, prefetchable| BarKind::Memory { wide, prefetchable };
        assert_eq!(bar.kind, memory(false, false));
        assert_eq!(config.bars(EDU).unwrap(), bars);
        // Ports, registers, and registers that may lie anywhere.
        let other = Address::new(0, 6, 0);
        let bars = config.assign(other, &mut window).unwrap();
        let kinds: Vec<_> = bars.iter().map(|bar| (bar.index, bar.kind)).collect();
        let wide = (4, memory(true, true));
        assert_eq!(
            kinds,
            [(0, BarKind::Io), (1, memory(false, false)), wide],
            "{bars:?}"
        );
        assert!(bars[1].address >= bar.address + bar.size);
        let mut high = Window::new(5 << 30, 1 << 30);
        let error = config.assign(other, &mut high).unwrap_err();
        assert!(matches!(error, pci::Error::NoRoom { index: 1, .. }));
        let error = config.bars(Address::new(0, 7, 0)).unwrap_err();
        assert_eq!(error.to_string(), "there is no function 00:07.0");
        // It answers once it is enabled.
        assert_ne!(machine.readl(bar.address).unwrap() & 0xff, 0xed);
        config.enable(EDU).unwrap();
        let answers = || machine.readl(bar.address).unwrap() & 0xff == 0xed;
        assert!(answers());
        // Looking leaves it as it was, moving does not.
        config.bars(EDU).unwrap();
        assert!(answers());
        assert_eq!(config.assign(EDU, &mut WINDOW.clone()).unwrap(), [bar]);
        assert!(!answers());
    }
}

/// Copies through the device, in memory that it was never given before.
fn copies(machine: &Machine) {
    let config = Config::q35(machine, ECAM).unwrap();
    let bars = config.assign(EDU, &mut WINDOW.clone()).unwrap();
    config.enable(EDU).unwrap();
    let edu = Edu::new(machine, bars[0].address).unwrap();
    let bytes: Vec<u8> = (0..4095).map(|i| ((i * 7) >> 2) as u8).collect();
    machine.write(0x10_0000, &bytes).unwrap();
    edu.read(0x10_0000, 0, edu::BUFFER_BYTES).unwrap();
    edu.write(0x20_0001, 0, edu::BUFFER_BYTES).unwrap();
    edu.write(0x30_0000, 4090, 5).unwrap();
    let mut back = [0; 4095];
    machine.read(0x20_0001, &mut back).unwrap();
    assert!(bytes == back);
    machine.read(0x30_0000, &mut back[..6]).unwrap();
    assert_eq!(back[..5], bytes[4090..]);
    assert_eq!(back[5], 0);
    for (at, len) in [(0, 0), (0, 4096), (4095, 1), (u64::MAX, 2)] {
        let error = edu.read(0x10_0000, at, len).unwrap_err();
        assert!(matches!(error, edu::Error::Length { .. }));
    }
    // Without the right to do DMA nothing comes.
    config.command(EDU, 0, pci::COMMAND_MASTER).unwrap();
    edu.write(0x40_0000, 0, 16).unwrap();
    assert_eq!(machine.readq(0x40_0000).unwrap(), 0);
}

#[test]
fn edu_copies_by_dma() {
    let Some(machine) = machine() else { return };
    copies(&machine);
    let error = Edu::new(&machine, 0x10_0000).unwrap_err();
    assert!(matches!(
        error,
        edu::Error::Absent {
            base: 0x10_0000,
            ..
        }
    ));
}

#[test]
fn interrupts_are_heard_in_order() {
    let Some(machine) = machine() else { return };
    let config = Config::ports(&machine);
    let bars = config.assign(EDU, &mut WINDOW.clone()).unwrap();
    config.enable(EDU).unwrap();
    let edu = Edu::new(&machine, bars[0].address).unwrap();
    machine.irq_intercept_in("ioapic").unwrap();
    // Others may have their say: the timer has.
    let of_edu = |raised| {
        loop {
            let irq = machine.wait_irq(Duration::from_secs(10)).unwrap();
            match irq.unwrap() {
                irq if irq.line >= 16 => {
                    assert_eq!(irq.raised, raised);
                    return irq.line;
                }
                Irq { .. } => {}
            }
        }
    };
    edu.raise(0x30).unwrap();
    assert_eq!(edu.raised().unwrap(), 0x30);
    let line = of_edu(true);
    assert!(machine.irq_raised(line));
    edu.acknowledge(0x10).unwrap();
    assert!(machine.irq_raised(line), "there is another reason");
    edu.acknowledge(0x20).unwrap();
    assert_eq!(of_edu(false), line);
    assert!(!machine.irq_raised(line));
}

#[test]
fn a_qemu_that_does_not_like_its_arguments_has_died_and_says_why() {
    let mut qemu = Command::new(program());
    qemu.args(["-machine", "nobodys"]);
    match Machine::start(qemu) {
        Err(Error::Start { source, .. }) if source.kind() == ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no {}", program());
        }
        Err(Error::Died { status, said, .. }) => {
            assert!(!status.unwrap().success());
            assert!(said.contains("machine type"), "{said}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_qemu_that_ends_meanwhile_has_died() {
    let Some(machine) = machine() else { return };
    let id = machine.process_id().unwrap();
    let kill = Command::new("kill").arg("-9").arg(id.to_string()).status();
    assert!(kill.unwrap().success());
    // It may still answer for a moment.
    let error = (0..1000).find_map(|_| machine.readb(0).err()).unwrap();
    match error {
        Error::Died { status, .. } => assert!(!status.unwrap().success()),
        other => panic!("{other}"),
    }
    let next = machine.readb(0).unwrap_err();
    assert!(matches!(next, Error::OutOfStep { .. }), "{next}");
}

#[test]
fn a_qemu_ends_with_its_machine() {
    let Some(machine) = machine() else { return };
    let process = format!("/proc/{}", machine.process_id().unwrap());
    assert!(Path::new(&process).exists());
    drop(machine);
    assert!(!Path::new(&process).exists());
}

#[test]
fn a_socket_serves_a_qemu_that_lives_on() {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let missing = Machine::connect(&socket);
    assert!(matches!(missing, Err(Error::Connect { .. })));
    let mut qemu = q35(directory.path());
    qemu.args(["-display", "none", "-qtest-log", "none", "-qtest"]);
    qemu.arg(format!("unix:{},server=on,wait=off", socket.display()));
    let mut child = match qemu.spawn() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return eprintln!("SKIPPED: there is no {}", program());
        }
        child => child.unwrap(),
    };
    let connect = || {
        (0..1000).find_map(|_| match Machine::connect(&socket) {
            Ok(machine) => Some(machine),
            Err(_) => {
                thread::sleep(Duration::from_millis(10));
                None
            }
        })
    };
    let written = connect().map(|machine| machine.writel(0x10_0000, 0x1234_5678));
    let read = connect().map(|machine| machine.readl(0x10_0000));
    child.kill().unwrap();
    child.wait().unwrap();
    written.unwrap().unwrap();
    assert_eq!(read.unwrap().unwrap(), 0x1234_5678);
}

#[test]
fn an_nvme_controller_finds_its_commands_in_memory() {
    const NVME: Address = Address::new(0, 7, 0);
    let directory = TempDir::new().unwrap();
    let mut qemu = q35(directory.path());
    let disk = directory.path().join("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
    qemu.args(["-drive", &drive]);
    qemu.args(["-device", "nvme,addr=7,serial=a-serial-number,drive=disk"]);
    let Some(machine) = start(qemu) else { return };
    let config = Config::q35(&machine, ECAM).unwrap();
    let found = config.functions(0).unwrap();
    let function = found.iter().find(|found| found.address == NVME).unwrap();
    assert_eq!(function.class, nvme::CLASS);
    let bars = config.assign(NVME, &mut WINDOW.clone()).unwrap();
    config.enable(NVME).unwrap();
    let ring = |address| Ring {
        address,
        device: address,
    };
    let nobody = Nvme::new(&machine, 0x100_0000, ring(0x10_0000), ring(0x20_0000));
    assert!(matches!(nobody, Err(nvme::Error::Absent { found: 0, .. })));
    let mut nvme = Nvme::new(&machine, bars[0].address, ring(0x10_0000), ring(0x20_0000)).unwrap();
    // More than two rounds of the rings.
    for nth in 0..150 {
        let data = 0x30_0000 + nth * nvme::IDENTIFY_BYTES;
        assert_eq!(nvme.identify(data).unwrap(), Status::SUCCESS);
        let mut serial = [0; 20];
        machine.read(data + 4, &mut serial).unwrap();
        assert_eq!(&serial, b"a-serial-number     ", "command {nth}");
    }
    // Blocks: in one page, in two, and by a list of addresses; the first page is not a whole one.
    let bytes_of = |pages: u64| pages * nvme::PAGE_BYTES - 512;
    let data = |pages| Data {
        device: 0x40_0000 + 512,
        bytes: bytes_of(pages),
        list: ring(0x60_0000),
    };
    let none = nvme.read(0, data(1));
    assert!(matches!(none, Err(nvme::Error::NoQueues)));
    let created = nvme.create_queues(ring(0x61_0000), ring(0x62_0000));
    assert_eq!(created.unwrap(), Status::SUCCESS);
    for pages in [1, 2, 3, 9] {
        let bytes: Vec<u8> = (0..bytes_of(pages))
            .map(|nth| (nth * pages / 7) as u8)
            .collect();
        machine.write(data(pages).device, &bytes).unwrap();
        assert_eq!(nvme.write(3 * pages, data(pages)).unwrap(), Status::SUCCESS);
        machine
            .memset(data(pages).device, data(pages).bytes, 0xee)
            .unwrap();
        assert_eq!(nvme.read(3 * pages, data(pages)).unwrap(), Status::SUCCESS);
        let mut found = vec![0; bytes.len()];
        machine.read(data(pages).device, &mut found).unwrap();
        assert!(found == bytes, "{pages} pages");
    }
    for bytes in [0, 100, bytes_of(nvme::MOST_PAGES) + 512] {
        let refused = nvme.read(0, Data { bytes, ..data(1) });
        let right = matches!(refused, Err(nvme::Error::Data { .. }));
        assert!(right, "{bytes}: {refused:?}");
    }
    let whole = (1 << 20) / nvme::BLOCK_BYTES;
    assert_ne!(nvme.read(whole, data(1)).unwrap(), Status::SUCCESS);
    nvme.stop().unwrap();
    // A ring where no memory is.
    let nowhere = Ring {
        address: 0x10_0000,
        device: 1 << 45,
    };
    let mut lost = Nvme::new(&machine, bars[0].address, nowhere, ring(0x20_0000)).unwrap();
    let fatal = lost.identify(0x30_0000).unwrap_err();
    assert!(matches!(fatal, nvme::Error::Fatal { .. }), "{fatal}");
    // It can be set up again.
    let mut nvme = Nvme::new(&machine, bars[0].address, ring(0x10_0000), ring(0x20_0000)).unwrap();
    assert_eq!(nvme.identify(0x30_0000).unwrap(), Status::SUCCESS);
}
