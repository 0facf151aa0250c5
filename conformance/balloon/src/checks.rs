//! What is asked of a stock guest and a balloon together.
//!
//! What the balloon did is seen from outside: the pages that the machine holds for the guest's memory
//! ([`Guest::held`]), and what the guest's own kernel counts.

use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::daemon::Daemon;
use crate::guest::{Driver, Guest, until};

/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// What the guest's own doings may take or give meanwhile.
const SLACK: u64 = 8 * MIB;

/// A balloon, as whoever sets its target sees it.
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

    /// Bytes that the guest has reported as free.
    ///
    /// # Errors
    ///
    /// When the device has gone.
    fn reported(&mut self) -> anyhow::Result<u64> {
        Ok(0)
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
/// What it left.
pub fn nothing_leaks(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run("mkdir -p /debug && mount -t debugfs debug /debug 2> /dev/null; true")?;
    if guest.run("[ -e /debug/kmemleak ]").is_err() {
        return Ok(());
    }
    guest.run("rmmod /dmaspace_balloon.ko && echo clear > /debug/kmemleak || true")?;
    // What is younger than five seconds is not reported.
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
pub fn cycles(guest: &mut Guest, daemon: &mut Daemon, count: u64, most: u64) -> anyhow::Result<()> {
    let free = free(guest)?;
    for nr in 1..=count {
        // Whole pages of all sizes, and odd ones.
        let bytes = (most / 4096 * (nr * 37 % 100 + 1) / 100) * 4096;
        for target in [bytes, bytes / 8192 * 4096, 0] {
            daemon.reach(target)?;
            let held = guest.number("awk '/^nr_balloon_pages/ { print $2 }' /proc/vmstat")?;
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
    daemon: &mut Daemon,
    driver: Driver,
    bytes: u64,
) -> anyhow::Result<()> {
    let free = free(guest)?;
    daemon.reach(bytes)?;
    for _ in 0..3 {
        guest.run("rmmod /dmaspace_balloon.ko")?;
        let back = free_now(guest)?;
        ensure!(
            back >= free - SLACK,
            "of {free} bytes free in the guest {back} are, without the driver"
        );
        let held = guest.number("awk '/^nr_balloon_pages/ { print $2 }' /proc/vmstat")?;
        ensure!(held == 0, "{held} pages in no balloon");
        guest.run(&format!("insmod {}", driver.module()))?;
        // The target is still there.
        until("a balloon that fills again", || {
            Ok((free_now(guest)? + bytes <= free + SLACK).then_some(()))
        })?;
    }
    daemon.reach(0)
}

/// Loads the driver, and makes a file system of memory as large as the guest.
///
/// # Errors
///
/// When the guest cannot.
pub fn prepare(guest: &mut Guest, driver: Driver) -> anyhow::Result<()> {
    let module = driver.module();
    guest.run(&format!(
        "insmod {module} && mount -t tmpfs -o size=100% tmp /tmp"
    ))?;
    Ok(())
}

/// Has the guest use all but about 48 MiB of the memory that is free there, and let it go again: the
/// machine holds pages for it afterwards.
///
/// # Errors
///
/// When the guest cannot.
pub fn touch(guest: &mut Guest) -> anyhow::Result<()> {
    let mib = guest.number("awk '/^MemFree/ { print int($2 / 1024) - 48 }' /proc/meminfo")?;
    guest.run(&format!(
        "dd if=/dev/zero of=/tmp/fill bs=1M count={mib} 2> /dev/null; rm /tmp/fill"
    ))?;
    Ok(())
}

/// Inflating gives memory back to the machine, and deflating gives it to the guest again.
///
/// # Errors
///
/// When it does not.
pub fn memory_comes_and_goes(
    guest: &mut Guest,
    balloon: &mut impl Balloon,
    bytes: u64,
) -> anyhow::Result<()> {
    // The guest may report what it has just let go of before it is in the balloon: then it is tried again.
    let mut tries = 0;
    let (held, free, less) = loop {
        let free = free(guest)?;
        let reported = balloon.reported()?;
        touch(guest)?;
        let held = guest.held()?;
        balloon.reach(bytes)?;
        let less = held.saturating_sub(guest.held()?);
        if balloon.reported()? == reported {
            break (held, free, less);
        }
        balloon.reach(0)?;
        tries += 1;
        ensure!(tries < 10, "the guest reports free pages all the time");
    };
    let given = free.saturating_sub(free_now(guest)?);
    ensure!(
        less >= bytes - SLACK,
        "a balloon of {bytes} bytes gave {less} back to the machine"
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
    let mut again = 0;
    until(
        "as much use of the guest's memory as before the balloon",
        || {
            let reported = balloon.reported()?;
            touch(guest)?;
            // What it used is free again by now, and may have been reported.
            again = guest.held()? + (balloon.reported()? - reported);
            Ok((again >= held - SLACK).then_some(()))
        },
    )
    .with_context(|| format!("the guest used {again} bytes of {held}"))
}

/// The driver takes all features of the standard, the poison if the kernel has one, and the bit of messages in bulk if
/// it is the one that has them.
///
/// # Errors
///
/// When it takes others.
pub fn features(guest: &mut Guest, driver: Driver) -> anyhow::Result<()> {
    let bits = guest.run("cat /sys/bus/virtio/devices/virtio0/features")?;
    let bits = bits.trim().char_indices().filter(|(_, bit)| *bit == '1');
    let bits: Vec<usize> = bits
        .map(|(number, _)| number)
        .filter(|number| *number < 24)
        .collect();
    let poisons = guest.run("cat /proc/cmdline")?.contains("page_poison=1");
    let mut expected = vec![0, 1, 2, 3];
    expected.extend(poisons.then_some(4));
    expected.push(5);
    expected.extend((driver == Driver::Bulk).then_some(23));
    ensure!(bits == expected, "features {bits:?}, not {expected:?}");
    Ok(())
}

/// What the guest says of itself is what its kernel says, each time it is asked.
///
/// # Errors
///
/// When it is not.
pub fn statistics(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<()> {
    let total = 1024 * guest.number("awk '/^MemTotal/ { print $2 }' /proc/meminfo")?;
    // The buffer that comes back first was filled when the driver was loaded, and the guest may be
    // reporting blocks while one of them is asked.
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

/// Free pages that the guest reports are given back, without a balloon.
///
/// # Errors
///
/// When they are not.
pub fn reporting(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<()> {
    let reported = daemon.count("reported_bytes")?;
    touch(guest)?;
    let free = free(guest)?;
    let used = 1024 * guest.number("awk '/^MemTotal/ { print $2 }' /proc/meminfo")? - free;
    // It reports blocks of 4 MiB, and not all at once.
    until("the guest's report of half of its free memory", || {
        let reported = daemon.count("reported_bytes")? - reported;
        let held = guest.held()?;
        Ok((reported > free / 2 && held < used + free / 2).then_some(()))
    })
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
        daemon.forget()?;
        daemon.say("hint")?;
        daemon.wait_for("hints_begin")?;
        let end = daemon.wait_for("hints_end")?;
        let hinted = end["hinted_bytes"].as_u64().unwrap_or(0) - before;
        before += hinted;
        ensure!(hinted > free / 2, "{hinted} bytes were hinted at of {free}");
        until("the return of the pages hinted at", || {
            Ok((free_now(guest)? + SLACK > free).then_some(()))
        })?;
    }
    Ok(())
}

/// A guest that wants more than is left takes it out of the balloon, and nobody is killed for it.
///
/// # Errors
///
/// When somebody is, or it does not.
pub fn out_of_memory(guest: &mut Guest, daemon: &mut Daemon, bytes: u64) -> anyhow::Result<()> {
    daemon.reach(bytes)?;
    let more = free(guest)? / MIB + 48;
    guest.run(&format!(
        "dd if=/dev/zero of=/tmp/fill bs=1M count={more} 2> /dev/null"
    ))?;
    let killed = guest.number("awk '/^oom_kill/ { print $2 }' /proc/vmstat")?;
    ensure!(killed == 0, "{killed} processes were killed");
    until("less in the balloon", || {
        Ok((daemon.actual()? <= bytes - 32 * MIB).then_some(()))
    })?;
    guest.run("rm /tmp/fill")?;
    // The target is the same, and is reached again when it is told again.
    daemon.reach(bytes)
}

/// Leaves about 48 MiB of the guest's free memory as it is; of the rest every other page becomes a file in
/// `/tmp/scattered`, and the others are free.
///
/// # Errors
///
/// When the guest cannot.
pub fn scatter(guest: &mut Guest) -> anyhow::Result<()> {
    guest.run(
        "mkdir /tmp/free /tmp/scattered && cd /tmp && n=0 && \
         while while read -r name free unit; do [ $name = MemFree: ] && break; done < /proc/meminfo; \
         [ $free -gt 49152 ]; do end=$((n + 500)); while [ $n -lt $end ]; do \
         echo > free/$n; echo > scattered/$n; n=$((n + 1)); done; done && rm -r free",
    )?;
    Ok(())
}

/// Pages of the balloon that the guest moves, to have its free memory in one piece, are exchanged: the
/// new one is given, then the old one taken. Returns how many.
///
/// # Errors
///
/// When there are none, or the books of both sides differ afterwards.
pub fn migration(guest: &mut Guest, daemon: &mut Daemon) -> anyhow::Result<u64> {
    const MOVED: &str = "awk '/^balloon_migrate/ { print $2 }' /proc/vmstat";
    daemon.reach(0)?;
    // So the balloon has single pages, whatever its driver takes first.
    scatter(guest)?;
    let bytes = free(guest)?.saturating_sub(24 * MIB) & !(MIB - 1);
    daemon.reach(bytes)?;
    guest.run("rm -r /tmp/scattered")?;
    let before = (
        guest.number(MOVED)?,
        daemon.count("inflated_bytes")?,
        daemon.count("deflated_bytes")?,
    );
    guest.run("echo 1 > /proc/sys/vm/compact_memory")?;
    let moved = guest.number(MOVED)? - before.0;
    ensure!(
        moved > 0,
        "the guest's compaction moved no page of the balloon"
    );
    let pages = 4096 * moved;
    until("the exchange of the pages that moved", || {
        let (given, taken) = (
            daemon.count("inflated_bytes")?,
            daemon.count("deflated_bytes")?,
        );
        Ok((given - before.1 == pages && taken - before.2 == pages).then_some(()))
    })?;
    let actual = daemon.actual()?;
    ensure!(
        actual == bytes,
        "{actual} bytes are in a balloon of {bytes}"
    );
    Ok(moved)
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

/// Bytes that are free in the guest: the most of ten readings in half a second, since blocks that the
/// guest is reporting are not free meanwhile, up to 32 of 4 MiB.
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

/// Bytes that are free in the guest at this moment, and not being reported.
fn free_now(guest: &mut Guest) -> anyhow::Result<u64> {
    Ok(1024 * guest.number("awk '/^MemFree/ { print $2 }' /proc/meminfo")?)
}
