//! Checks of a stock guest and a balloon together.
//!
//! Effects of the balloon are seen from outside: the pages that the machine holds for the guest's memory
//! ([`Guest::held`]), and what the guest's own kernel counts.

use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::daemon::Daemon;
use crate::guest::{Driver, Guest, until};

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// Bytes that the guest's own work may take or give meanwhile.
const SLACK: u64 = 8 * MIB;

/// The bit of the feature that the device knows what free pages are filled with.
const PAGE_POISON: usize = 4;

/// A balloon, as the setter of its target sees it.
pub trait Balloon {
    /// Wants `bytes` in it.
    ///
    /// # Errors
    ///
    /// When it cannot be told.
    fn set_target(&mut self, bytes: u64) -> anyhow::Result<()>;

    /// Bytes that the driver says are in it.
    ///
    /// # Errors
    ///
    /// When the device has gone.
    fn actual(&mut self) -> anyhow::Result<u64>;

    /// Bytes that were given so far, and that were taken, where the device tells.
    ///
    /// # Errors
    ///
    /// When the device has gone.
    fn exchanged(&mut self) -> anyhow::Result<Option<[u64; 2]>> {
        Ok(None)
    }

    /// Wants `bytes` in it, and waits until they are.
    ///
    /// # Errors
    ///
    /// When it does not come to that.
    fn reach(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.set_target(bytes)?;
        until(&format!("a balloon of {bytes} bytes"), || {
            Ok((self.actual()? == bytes).then_some(()))
        })
    }
}

/// The unloaded driver has left nothing allocated, where the kernel was built to know that.
///
/// # Errors
///
/// The leaks.
pub fn nothing_leaks(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run("mkdir -p /debug && mount -t debugfs debug /debug 2> /dev/null; true")?;
    if guest.run("[ -e /debug/kmemleak ]").is_err() {
        return Ok(());
    }
    guest.run("rmmod /dmaspace_balloon.ko && echo clear > /debug/kmemleak || true")?;
    // Blocks younger than five seconds are not reported.
    guest.run("insmod /dmaspace_balloon.ko && sleep 1 && rmmod /dmaspace_balloon.ko && sleep 6")?;
    let said = guest
        .run("echo scan > /debug/kmemleak; echo scan > /debug/kmemleak; cat /debug/kmemleak")?;
    ensure!(said.trim().is_empty(), "not freed: {said}");
    println!("  nothing leaks");
    Ok(())
}

/// As many cycles of inflating and deflating, each to another size: what the guest counts as held is what the
/// device counts.
///
/// # Errors
///
/// When it is not, or memory is missing at the end.
pub fn cycles(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    count: u64,
    most: u64,
) -> anyhow::Result<()> {
    let free = free(guest)?;
    for nr in 1..=count {
        // Whole pages of all sizes, and odd ones.
        let bytes = (most / 4096 * (nr * 37 % 100 + 1) / 100) * 4096;
        for target in [bytes, bytes / 8192 * 4096, 0] {
            balloon.reach(target)?;
            let held = count_of(guest, "nr_balloon_pages")?;
            ensure!(
                held * 4096 == target,
                "cycle {nr}: {held} pages in a balloon of {target} bytes"
            );
        }
    }
    let back = self::free(guest)?;
    ensure!(
        back + SLACK >= free,
        "of {free} bytes free in the guest {back} are, after {count} cycles"
    );
    Ok(())
}

/// The driver's module goes while there is something in the balloon, and comes again: the guest has all of its
/// memory after each, and the device sees an empty balloon before it is filled anew.
///
/// # Errors
///
/// When it does not.
pub fn module_comes_and_goes(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    driver: Driver,
    bytes: u64,
) -> anyhow::Result<()> {
    balloon.reach(0)?;
    let free = free(guest)?;
    balloon.reach(bytes)?;
    for _ in 0..3 {
        unload(guest, driver)?;
        let back = free_now(guest)?;
        ensure!(
            back >= free - SLACK,
            "of {free} bytes free in the guest {back} are, without the driver"
        );
        let held = count_of(guest, "nr_balloon_pages")?;
        ensure!(held == 0, "{held} pages in no balloon");
        load(guest, driver)?;
        // The target is still there.
        until("a balloon that fills again", || {
            Ok((free_now(guest)? + bytes <= free + SLACK).then_some(()))
        })?;
    }
    balloon.reach(0)
}

/// The guest sleeps and wakes: the device is reset meanwhile, and the balloon is filled again.
///
/// # Errors
///
/// When it is not.
pub fn sleep(guest: &mut Guest, balloon: &mut impl Balloon, bytes: u64) -> anyhow::Result<()> {
    balloon.reach(bytes)?;
    let taken = count_of(guest, "balloon_inflate")?;
    // Devices sleep for a second; the processors do not.
    guest.run(
        "echo 1 > /sys/module/suspend/parameters/pm_test_delay && \
         echo devices > /sys/power/pm_test && echo freeze > /sys/power/state",
    )?;
    until("a balloon that was filled again after sleep", || {
        let again = count_of(guest, "balloon_inflate")? - taken;
        let held = count_of(guest, "nr_balloon_pages")?;
        Ok((again * 4096 >= bytes && held * 4096 == bytes).then_some(()))
    })?;
    balloon.reach(0)
}

/// The device is taken from the guest while the balloon is filled, and comes back: the guest has all of its memory in
/// between, and the balloon is filled again afterwards.
///
/// # Errors
///
/// When it does not.
pub fn removal(guest: &mut Guest, balloon: &mut impl Balloon, bytes: u64) -> anyhow::Result<()> {
    const DEVICE: &str = "/sys/bus/virtio/devices/virtio0";
    balloon.reach(0)?;
    let free = free(guest)?;
    balloon.set_target(bytes)?;
    until("a page in the balloon", || {
        Ok((count_of(guest, "nr_balloon_pages")? > 0).then_some(()))
    })?;
    guest.run(&format!("echo 1 > $(readlink -f {DEVICE}/../remove)"))?;
    let (held, back) = (count_of(guest, "nr_balloon_pages")?, self::free(guest)?);
    ensure!(
        held == 0 && back + SLACK >= free,
        "without its device {held} pages are in the balloon, and of {free} bytes {back} free"
    );
    guest.run("echo 1 > /sys/bus/pci/rescan")?;
    until("a balloon filled by the device that came back", || {
        Ok((count_of(guest, "nr_balloon_pages")? * 4096 == bytes).then_some(()))
    })?;
    balloon.reach(0)
}

/// Makes a file system of memory as large as the guest.
///
/// # Errors
///
/// When the guest cannot.
pub fn prepare(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run("mount -t tmpfs -o size=100%,nr_inodes=0 tmp /tmp")?;
    Ok(())
}

/// Loads a driver.
///
/// # Errors
///
/// When the guest cannot.
pub fn load(guest: &mut Guest, driver: Driver) -> anyhow::Result<()> {
    guest.run(&format!("insmod {}", driver.module())).map(drop)
}

/// Unloads it.
///
/// # Errors
///
/// When the guest cannot.
pub fn unload(guest: &mut Guest, driver: Driver) -> anyhow::Result<()> {
    guest.run(&format!("rmmod {}", driver.file())).map(drop)
}

/// Has the guest use all but about 48 MiB of the memory that is free there, and let it go again: the
/// machine holds at least the bytes returned for it afterwards, unless the guest reports free pages.
///
/// # Errors
///
/// When the guest cannot.
pub fn touch(guest: &mut Guest) -> anyhow::Result<u64> {
    let mib = guest.number("awk '/^MemFree/ { print int($2 / 1024) - 48 }' /proc/meminfo")?;
    guest.number(&format!(
        "dd if=/dev/zero of=/tmp/fill bs=1M count={mib} 2> /dev/null && wc -c < /tmp/fill && rm /tmp/fill"
    ))
}

/// Inflating gives memory back to the machine, and deflating gives it to the guest again, which reports no free pages.
///
/// # Errors
///
/// When it does not.
pub fn memory_comes_and_goes(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    bytes: u64,
) -> anyhow::Result<()> {
    let most = guest.memory_bytes()?.saturating_sub(bytes);
    let free = free(guest)?;
    let filled = touch(guest)?;
    let held = guest.held()?;
    ensure!(
        held >= filled && filled > free.saturating_sub(bytes),
        "the guest filled {filled} bytes of {free}, and the machine holds {held}"
    );
    balloon.reach(bytes)?;
    let given = free.saturating_sub(free_now(guest)?);
    let left = guest.held()?;
    ensure!(
        left <= most,
        "with {bytes} bytes in the balloon the machine holds {left} of {held}"
    );
    ensure!(
        given >= bytes - SLACK,
        "a balloon of {bytes} bytes took {given} of the guest's free memory"
    );
    balloon.reach(0)?;
    let mut back = 0;
    until("free memory in the guest as before the balloon", || {
        back = free_now(guest)?;
        Ok((back >= free - SLACK).then_some(()))
    })
    .with_context(|| format!("of {free} bytes free in the guest {back} are"))?;
    // Which free pages the guest takes is its own choice; more than were free beside the balloon
    // are pages out of it.
    let filled = touch(guest)?;
    let again = guest.held()?;
    ensure!(
        again >= filled && filled > free.saturating_sub(given),
        "the guest filled {filled} bytes of {free}, and the machine holds {again}"
    );
    Ok(())
}

/// The driver takes all features of those that are offered and that it has; the poison only if the kernel has one.
///
/// # Errors
///
/// When it takes others.
pub fn features(guest: &mut Guest, offered: &[usize]) -> anyhow::Result<()> {
    let bits = guest.run("cat /sys/bus/virtio/devices/virtio0/features")?;
    let bits = bits.trim().char_indices().filter(|(_, bit)| *bit == '1');
    let bits: Vec<usize> = bits
        .map(|(number, _)| number)
        .filter(|number| *number < 24)
        .collect();
    let poisons = poisons(guest)?;
    let mut expected = offered.to_vec();
    expected.retain(|bit| *bit != PAGE_POISON || poisons);
    ensure!(bits == expected, "features {bits:?}, not {expected:?}");
    Ok(())
}

/// True if the guest fills free pages. Those are reported, but not given back: they would be zeros (VIRTIO 1.3,
/// 5.5.6.7.2).
///
/// # Errors
///
/// When it does not say.
pub fn poisons(guest: &mut Guest) -> anyhow::Result<bool> {
    Ok(guest.run("cat /proc/cmdline")?.contains("page_poison=1"))
}

/// Statistics of the guest agree with its kernel's counters, at each request.
///
/// # Errors
///
/// When they do not.
pub fn statistics(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<()> {
    let total = 1024 * guest.number("awk '/^MemTotal/ { print $2 }' /proc/meminfo")?;
    // The buffer that comes back first was filled when the driver was loaded.
    let mut agreed = 0;
    let mut last = String::new();
    until("free memory in the statistics as in the guest", || {
        daemon.forget()?;
        daemon.say("stats")?;
        let stats = daemon.wait_for("stats")?;
        ensure!(
            stats["total_bytes"] == total,
            "{total} bytes in all, but {stats}"
        );
        ensure!(stats["minor_faults"].as_u64() > Some(0), "{stats}");
        let (said, free) = (stats["free_bytes"].as_u64().unwrap_or(0), free_now(guest)?);
        agreed += u32::from(said.abs_diff(free) < SLACK);
        last = format!("{free} bytes are free in the guest, but {stats}");
        Ok((agreed == 2).then_some(()))
    })
    .with_context(|| last)
}

/// Free pages that the guest reports, from the load of this driver on, are given back. The driver is unloaded again.
///
/// # Errors
///
/// When they are not.
pub fn reporting(guest: &mut Guest, driver: Driver) -> anyhow::Result<()> {
    touch(guest)?;
    let (blocks, held) = (blocks(guest)?, guest.held()?);
    ensure!(blocks > 64 * MIB, "only {blocks} bytes are free in blocks");
    load(guest, driver)?;
    until("a report of half of the free blocks", || {
        // It ends when it hears nothing for long.
        guest.run("true")?;
        Ok((guest.held()? + blocks / 2 <= held).then_some(()))
    })?;
    unload(guest, driver)
}

/// Bytes that are free in blocks of 4 MiB, the largest.
fn blocks(guest: &mut Guest) -> anyhow::Result<u64> {
    let count = guest.number("awk '{ count += $NF } END { print count }' /proc/buddyinfo")?;
    Ok(count * 4 * MIB)
}

/// The driver hints at its free pages when the host asks, and has them again afterwards.
///
/// # Errors
///
/// When it does not.
pub fn hinting(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<()> {
    let free = free(guest)?;
    let mut before = 0;
    for _ in 0..2 {
        let blocks = blocks(guest)?;
        ensure!(blocks > 32 * MIB, "only {blocks} bytes are free in blocks");
        daemon.forget()?;
        daemon.say("hint")?;
        daemon.wait_for("hints_begin")?;
        let end = daemon.wait_for("hints_end")?;
        let hinted = end["hinted_bytes"].as_u64().unwrap_or(0) - before;
        before += hinted;
        ensure!(
            hinted >= blocks / 2,
            "{hinted} bytes were hinted at of {blocks} in blocks"
        );
        until("the return of the pages hinted at", || {
            Ok((free_now(guest)? + SLACK > free).then_some(()))
        })?;
    }
    Ok(())
}

/// A guest that wants more than is left takes it out of the balloon, and no process is killed for it.
///
/// # Errors
///
/// When one is, or it does not.
pub fn out_of_memory(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    bytes: u64,
) -> anyhow::Result<()> {
    balloon.reach(bytes)?;
    let killed = count_of(guest, "oom_kill")?;
    let more = free(guest)? / MIB + 48;
    guest.run(&format!(
        "dd if=/dev/zero of=/tmp/fill bs=1M count={more} 2> /dev/null"
    ))?;
    let killed = count_of(guest, "oom_kill")? - killed;
    ensure!(killed == 0, "{killed} processes were killed");
    until("less in the balloon", || {
        Ok((balloon.actual()? <= bytes - 32 * MIB).then_some(()))
    })?;
    guest.run("rm /tmp/fill")?;
    // The same target is set again, and reached again.
    balloon.reach(bytes)
}

/// Leaves about 48 MiB of the guest's free memory as it is; of the rest every other page becomes a file in
/// `/tmp/scattered`, and the others are free.
///
/// # Errors
///
/// When the guest cannot.
pub fn scatter(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run(
        "mkdir /tmp/free /tmp/scattered && awk 'BEGIN { n = 0; do { \
         for (end = n + 500; n < end; n++) { \
         name = \"/tmp/free/\" n; print > name; close(name); \
         name = \"/tmp/scattered/\" n; print > name; close(name) } \
         while ((getline < \"/proc/meminfo\") > 0 && $1 != \"MemFree:\"); close(\"/proc/meminfo\") \
         } while ($2 > 49152) }' && rm -r /tmp/free",
    )?;
    Ok(())
}

/// MiB of a guest with a whole block of movable memory, and its kernel's word for that: the block of 128 MiB at 256 MiB.
pub const MOVABLE_GUEST: u32 = 400;
/// See [`MOVABLE_GUEST`].
pub const MOVABLE: &str = "movablecore=176M";
/// More than there is movable memory beside that block.
const MOVABLE_BALLOON: u64 = 56 * MIB;

/// Pages of the balloon in a block of memory that goes offline are exchanged: the new one is given, then the old one
/// taken. Returns how many.
///
/// # Errors
///
/// When there are none, or the books of both sides stay different.
pub fn migration(guest: &mut Guest, balloon: &mut impl Balloon) -> anyhow::Result<u64> {
    const BLOCK: &str = "/sys/devices/system/memory/memory2";
    let zone = guest.run(&format!("cat {BLOCK}/valid_zones"))?;
    ensure!(zone.trim() == "Movable", "{BLOCK} is of {zone}");
    // In steps so small that all are single pages, which can be moved and come from movable memory first.
    for bytes in (MIB..=MOVABLE_BALLOON).step_by(MIB as usize) {
        balloon.reach(bytes)?;
    }
    let before = books(guest, balloon)?;
    guest.run(&format!("echo offline > {BLOCK}/state"))?;
    let moved = until("books of both sides that say the same", || {
        let now = books(guest, balloon)?;
        let moved = now.moved - before.moved;
        let taken = (moved + before.held).saturating_sub(now.held);
        let exchanged = before
            .exchanged
            .map(|[given, back]| [given + 4096 * moved, back + 4096 * taken]);
        let same = now.exchanged == exchanged && balloon.actual()? == 4096 * now.held;
        Ok(same.then_some(moved))
    })?;
    ensure!(moved > 0, "no page of the balloon was moved");
    guest.run(&format!("echo online_movable > {BLOCK}/state"))?;
    Ok(moved)
}

/// Counts of the guest, in pages, and of the device, in bytes.
struct Books {
    moved: u64,
    held: u64,
    exchanged: Option<[u64; 2]>,
}

fn books(guest: &mut Guest, balloon: &mut impl Balloon) -> anyhow::Result<Books> {
    Ok(Books {
        moved: count_of(guest, "balloon_migrate")?,
        held: count_of(guest, "nr_balloon_pages")?,
        exchanged: balloon.exchanged()?,
    })
}

/// Files whose bytes are to outlast everything.
///
/// # Errors
///
/// When the guest cannot make them.
pub fn write_data(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run(
        "mkdir /tmp/data && cd /tmp/data && for n in 1 2 3 4 5 6 7 8; do \
         dd if=/dev/urandom of=$n bs=256K count=16 2> /dev/null; done && md5sum * > /sums",
    )?;
    Ok(())
}

/// They did.
///
/// # Errors
///
/// When a byte is another.
pub fn data_is_intact(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run("cd /tmp/data && md5sum -c -s /sums")?;
    Ok(())
}

/// Bytes that are free in the guest: the most of ten readings in half a second, since what was freed last may still be
/// on its way.
///
/// # Errors
///
/// When it does not say.
pub fn free(guest: &mut Guest) -> anyhow::Result<u64> {
    let mut most = 0;
    for _ in 0..10 {
        most = most.max(free_now(guest)?);
        thread::sleep(Duration::from_millis(50));
    }
    Ok(most)
}

/// A count of the guest's `/proc/vmstat`.
///
/// # Errors
///
/// When it does not say.
pub fn count_of(guest: &mut Guest, name: &str) -> anyhow::Result<u64> {
    // Each processor keeps a part of the counts to itself for a while.
    guest.number(&format!(
        "cat /proc/sys/vm/stat_refresh 2> /dev/null; awk '/^{name} / {{ print $2 }}' /proc/vmstat"
    ))
}

/// Bytes that are free in the guest at this moment.
fn free_now(guest: &mut Guest) -> anyhow::Result<u64> {
    Ok(1024 * guest.number("awk '/^MemFree/ { print $2 }' /proc/meminfo")?)
}
