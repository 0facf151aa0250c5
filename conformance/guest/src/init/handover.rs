//! A live address space goes over to a second process, while the device goes on.
//!
//! ```text
//! first                                    second
//! maps a memory file, gives up
//! starts the second process ── files ──▶   notes the same areas
//!                                          takes over: charged here, and not there any more
//!           ◀── charged ──
//! ends with all its files
//!            ── go on ──▶                  has the device copy, unmaps everything
//! ```
//!
//! The files go through a Unix socket, which is the second process's standard input.

use std::{
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use guest::machines::EDU;
use hostmem::{Backing, Mapping};
use ioas::{
    AttachError, Errno, Ioas, KernelError, Ledger, MapError,
    iommufd::{self, BoundDevice, DevId, IoasId, SpaceMapper},
    vfio::{self, Container, ContainerMapper, Group},
};
use iopt::Prot;
use runs::{Iova, Offset, Span};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{
    dma::{IOVA, check, memory},
    edu::{BUFFER, Edu},
    limit::{counter, limited, unprivileged},
    pci,
    semantics::{counter_of, table::Column},
    space::{DeviceOf, Interface, Iommufd, Space, Type1, host_memory},
};

/// Bytes of the memory, of which the halves are mapped apart.
const SIZE: u64 = 4 << 20;
/// The two areas: where, and offset and length in the memory.
const AREAS: [(u64, Span<Offset>); 2] = [
    (IOVA, Span::new(0, SIZE / 2)),
    (IOVA + (1 << 30), Span::new(SIZE / 2, SIZE / 2)),
];

/// First argument of a second process, followed by its interface.
const TAKE_OVER: &str = "take-over";

/// Files of a process: of its own, or on their way.
const FILES: usize = 4;

/// An interface whose address spaces can be handed over.
pub(crate) trait HandedOver: Interface + 'static {
    const NAME: &'static str;
    /// The least limit on locked memory with which it can be done.
    const LIMIT: u64;
    /// With less it is refused, nothing has changed then, and it can be tried again.
    const TRY_AGAIN: bool;

    /// The kernel's files, and numbers in them.
    fn hand_over(space: &Space<Self>) -> anyhow::Result<(Vec<BorrowedFd<'_>>, [u32; 2])>
    where
        Self: Sized;

    /// The operations, what is attached and the device itself, of files that another process has
    /// handed over.
    fn receive(
        files: [OwnedFd; 2],
        numbers: [u32; 2],
    ) -> anyhow::Result<(Self::Mapper, Arc<DeviceOf<Self>>)>;
}

impl HandedOver for Type1 {
    const NAME: &'static str = "type1";
    /// Each process has a counter of its own.
    const LIMIT: u64 = SIZE;
    const TRY_AGAIN: bool = false;

    fn hand_over(space: &Space<Self>) -> anyhow::Result<(Vec<BorrowedFd<'_>>, [u32; 2])> {
        let container = space.container.as_ref().context("no container")?;
        Ok((vec![container.as_fd(), space.attached()?.as_fd()], [0; 2]))
    }

    fn receive(
        [container, group]: [OwnedFd; 2],
        _: [u32; 2],
    ) -> anyhow::Result<(ContainerMapper, Arc<Group>)> {
        let mapper = ContainerMapper::new(Container::from_fd(container)?);
        Ok((mapper, Arc::new(Group::from_fd(group))))
    }
}

impl HandedOver for Iommufd {
    const NAME: &'static str = "iommufd";
    /// Both processes are of one user, who is charged once more before the first charge goes.
    const LIMIT: u64 = 2 * SIZE;
    const TRY_AGAIN: bool = true;

    fn hand_over(space: &Space<Self>) -> anyhow::Result<(Vec<BorrowedFd<'_>>, [u32; 2])> {
        let (bound, ioas) = (space.attached()?, space.number);
        let files = vec![space.file().as_fd(), bound.device.as_fd()];
        Ok((files, [ioas, bound.id.0]))
    }

    fn receive(
        [iommufd, device]: [OwnedFd; 2],
        [ioas, id]: [u32; 2],
    ) -> anyhow::Result<(SpaceMapper, Arc<BoundDevice>)> {
        let owner = iommufd::Iommufd::from_fd(iommufd);
        let device = vfio::VfioDevice::from_fd(device);
        let bound = BoundDevice {
            device,
            id: DevId(id),
        };
        Ok((SpaceMapper::existing(&owner, IoasId(ioas)), Arc::new(bound)))
    }
}

/// The first process's part: without the privilege to lock without limit, since iommufd does not move
/// the mappings of a process that has it.
pub(crate) fn to_a_second_process<I: HandedOver>() -> anyhow::Result<()> {
    unprivileged(I::LIMIT, first_process::<I>)
}

fn first_process<I: HandedOver>() -> anyhow::Result<()> {
    let counted = counter_of(I::COLUMN);
    let before = counter(counted)?;
    let locked = || anyhow::Ok(counter(counted)? - before);
    let mapping = memory(Backing::Memfd, SIZE)?;
    let ledger = Ledger::new(counted, Some(SIZE), 0);
    let space = Space::<I>::with_ledger(pci::Device(EDU), ledger)?;
    let memory = host_memory(&mapping, &space.ledger)?;
    for (iova, part) in AREAS {
        space.ioas.map(iova, &memory, part, Prot::RW)?;
    }
    let edu = Edu::new(space.device()?)?;
    edu.read(AREAS[1].0, BUFFER)?;
    edu.write(IOVA, BUFFER)?;

    let pieces = space.ioas.give_up()?;
    ensure!(pieces.len() == 2, "{pieces:?}");
    ensure!(space.ledger.in_use() == 0, "charged to whom gave up");
    ensure!(locked()? == SIZE, "{:#x} bytes locked", locked()?);
    // No process says where the memory is, and the device goes on.
    edu.write(IOVA + BUFFER, BUFFER)?;

    let (ours, theirs) = UnixStream::pair()?;
    let mut second = Command::new("/proc/self/exe")
        .args([TAKE_OVER, I::NAME])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let (kernel, numbers) = I::hand_over(&space)?;
    let device = space.device()?.as_fd();
    let file = mapping.fd().context("no memory file")?;
    let files = [kernel[0], kernel[1], device, file];
    let said = serde_json::to_vec(&(numbers, spans(&pieces)))?;
    send(&ours, &said, files)?;
    hear(&ours, "charged")?;
    ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
    edu.write(IOVA + 2 * BUFFER, BUFFER)?;
    drop(edu);
    drop(space);
    (&ours).write_all(b"go on\n")?;
    hear(&ours, "done")?;
    let status = second.wait()?;
    ensure!(status.success(), "the second process ended with {status}");
    let (words, half) = (BUFFER / 8, SIZE / 2 / 8);
    // One buffer of the second half, four times: three from here.
    check(mapping.cells(), |nth| match nth / words {
        0..4 => nth % words + half,
        _ => nth,
    })
}

/// Mappings that cannot be handed over stay, and the device goes on: those of the compatibility layer,
/// and memory of iommufd that is no file.
pub(crate) fn stays<I: Interface>() -> anyhow::Result<()> {
    let mapping = memory(Backing::Anon4K, SIZE)?;
    let mut space = Space::<I>::open(pci::Device(EDU))?;
    space.map_host(IOVA, &mapping, Prot::RW)?;
    let edu = Edu::new(space.device()?)?;
    match space.ioas.give_up() {
        Err(KernelError::NoSource) if I::COLUMN == Column::Iommufd => {}
        Err(KernelError::Refused { errno, .. }) if errno == Errno::EINVAL.0 => {}
        other => bail!("{other:?}"),
    }
    ensure!(
        space.ioas.kernel_mappings().unwrap_or_default().len() == 1,
        "given up"
    );
    ensure!(space.ledger.in_use() == SIZE, "not charged any more");
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + BUFFER, BUFFER)?;
    let words = BUFFER / 8;
    check(mapping.cells(), |nth| {
        if nth / words == 1 { nth - words } else { nth }
    })?;
    let unmapped = space.unmap(Span::new(IOVA, SIZE))?;
    ensure!(unmapped == SIZE, "{unmapped:#x} bytes unmapped");
    Ok(())
}

fn spans(pieces: &[Span<Iova>]) -> Vec<(u64, u64)> {
    pieces
        .iter()
        .map(|piece| (piece.start, piece.len))
        .collect()
}

/// The second process's part: what `main` is called with, when it is not the first.
pub(crate) fn second_process(arguments: &[String]) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let socket = UnixStream::from(socket);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        [TAKE_OVER, Type1::NAME] => take_over::<Type1>(&socket),
        [TAKE_OVER, Iommufd::NAME] => take_over::<Iommufd>(&socket),
        _ => bail!("guest-init is the first process of a guest, started by its kernel"),
    };
    // The first process reports it.
    result.inspect_err(|error| drop((&socket).write_all(format!("{error:#}\n").as_bytes())))
}

fn take_over<I: HandedOver>(socket: &UnixStream) -> anyhow::Result<()> {
    let counted = counter_of(I::COLUMN);
    let before = counter(counted)?;
    let locked = || anyhow::Ok(counter(counted)? - before);
    let (said, [first, second, device, file]) = receive(socket)?;
    let (numbers, pieces): ([u32; 2], Vec<(u64, u64)>) = serde_json::from_slice(&said)?;
    let pieces: Vec<Span<Iova>> = pieces
        .into_iter()
        .map(|(start, len)| Span::new(start, len))
        .collect();
    let mapping = Arc::new(Mapping::of_file(file)?);
    let device = vfio::VfioDevice::from_fd(device);
    let ledger = Ledger::new(counted, Some(SIZE), 0);
    let memory = host_memory(&mapping, &ledger)?;

    let (mapper, attached) = I::receive([first, second], numbers)?;
    let ioas = Ioas::over_mapper(mapper);
    for (iova, part) in AREAS {
        ioas.map(iova, &memory, part, Prot::RW)?;
    }
    ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
    if I::TRY_AGAIN {
        let take_over = || ioas.take_over(vec![attached.clone().into()], &pieces);
        match limited(I::LIMIT - 4096, take_over)? {
            // The process before holds the rest of the limit, which is not seen here.
            Err(AttachError::Replay {
                cause: MapError::NoMemory { .. },
                ..
            }) => {}
            Err(AttachError::Kernel(cause))
                if matches!(
                    cause.downcast_ref(),
                    Some(KernelError::Refused { errno, .. }) if *errno == Errno::ENOMEM.0
                ) => {}
            other => bail!("not refused for want of memory: {other:?}"),
        }
        ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
        ensure!(ledger.in_use() == 0, "{:#x} charged", ledger.in_use());
    }
    ioas.take_over(vec![attached.into()], &pieces)?;
    ensure!(locked()? == SIZE, "{:#x} bytes locked", locked()?);
    ensure!(ledger.in_use() == SIZE, "{:#x} charged", ledger.in_use());
    (&*socket).write_all(b"charged\n")?;

    hear(socket, "go on")?;
    let edu = Edu::new(&device)?;
    edu.read(AREAS[1].0, BUFFER)?;
    edu.write(IOVA + 3 * BUFFER, BUFFER)?;
    drop(edu);
    drop(device);
    let unmapped = ioas.unmap_all()?;
    ensure!(unmapped.bytes == SIZE, "{unmapped:?}");
    ensure!(ledger.in_use() == 0, "{:#x} charged", ledger.in_use());
    ensure!(locked()? == 0, "{:#x} bytes locked", locked()?);
    (&*socket).write_all(b"done\n")?;
    Ok(())
}

/// Waits for a line that must be this one.
fn hear(mut socket: &UnixStream, expected: &str) -> anyhow::Result<()> {
    let mut line = Vec::new();
    let mut byte = [0];
    while socket.read(&mut byte)? == 1 && byte != *b"\n" {
        line.extend(byte);
    }
    let line = String::from_utf8_lossy(&line);
    ensure!(line == expected, "the other process said {line:?}");
    Ok(())
}

fn send(socket: &UnixStream, said: &[u8], files: [BorrowedFd<'_>; FILES]) -> anyhow::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    ensure!(
        control.push(SendAncillaryMessage::ScmRights(&files)),
        "no room for files"
    );
    let sent = sendmsg(
        socket,
        &[IoSlice::new(said)],
        &mut control,
        SendFlags::empty(),
    )?;
    ensure!(sent == said.len(), "{sent} bytes sent");
    Ok(())
}

fn receive(socket: &UnixStream) -> anyhow::Result<(Vec<u8>, [OwnedFd; FILES])> {
    let mut said = vec![0; 4096];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut said)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    said.truncate(received.bytes);
    let files = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files.collect::<Vec<_>>()),
        _ => None,
    });
    let files = files.context("no files came")?;
    let files = files
        .try_into()
        .map_err(|_| anyhow::anyhow!("other files"))?;
    Ok((said, files))
}
