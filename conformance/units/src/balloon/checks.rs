//! The checks.

use std::time::Instant;

use anyhow::{anyhow, ensure};
use runs::{GuestAddr, Span};
use serde_json::json;
use virtio_balloon::{
    Features, Numbering, Queue,
    driver::{Error, Hinting, Progress, Settings, Transport as _, Wire},
};

use super::machine::{FILLED, Host, MEMORY, OUTSIDE, POOL, Taken};

const MIB: u64 = 1 << 20;

/// A check.
pub struct Check {
    /// What it shows.
    pub name: &'static str,
    /// Makes it with this program; says what was found.
    pub run: fn(&str) -> anyhow::Result<String>,
}

/// All of them.
pub const CHECKS: &[Check] = &[
    Check {
        name: "features are negotiated, and a device that is given up is taken over again",
        run: negotiate,
    },
    Check {
        name: "a target is followed up and down; what was told is discarded, and nothing else",
        run: follow,
    },
    Check {
        name: "blocks of 2 MiB and every second page; one page a message beside 256",
        run: messages,
    },
    Check {
        name: "the balloon gives way when memory is short, and pages migrate",
        run: life,
    },
    Check {
        name: "statistics are told when the device asks",
        run: stats,
    },
    Check {
        name: "free pages that are reported are discarded, with the queue's compressed number",
        run: reporting,
    },
    Check {
        name: "the poison value is told, and poisoned pages are kept",
        run: poison,
    },
    Check {
        name: "free pages are hinted to a migration, and come back when it is over",
        run: hinting,
    },
];

fn negotiate(program: &str) -> anyhow::Result<String> {
    let options = ",deflate-on-oom=on,free-page-reporting=on,free-page-hint=on,iothread=thread";
    let host = Host::start(program, options, true)?;
    let (mut driver, pages) = host.driver(Settings::default())?;
    let features = driver.features();
    let expected = [
        Features::STATS_VQ,
        Features::DEFLATE_ON_OOM,
        Features::FREE_PAGE_HINT,
        Features::PAGE_REPORTING,
        Features::VERSION_1,
    ];
    for feature in expected {
        ensure!(features.contains(feature), "{feature:?} of {features:?}");
    }
    ensure!(driver.wire() == Wire::Pfns, "QEMU has no messages in bulk");
    let all = pages.free();
    for _ in 0..3 {
        driver.inflate(8 * MIB)?;
        ensure!(host.actual()? == 8 * MIB, "not told");
        driver.freeze()?;
        ensure!(pages.free() == all && driver.held() == 0, "pages are left");
        driver.restore()?;
    }
    driver.remove()?;
    Ok(format!("features {:#x}", features.0))
}

/// What is in the balloon is gone, what is not is there, and both sides say the same.
fn agree(
    host: &Host,
    driver: &Taken<'_>,
    held: &[Span<GuestAddr>],
    kept: &[Span<GuestAddr>],
) -> anyhow::Result<()> {
    ensure!(host.actual()? == driver.held(), "what is told is not held");
    held.iter().try_for_each(|run| host.holds(*run, 0))?;
    let kept = kept.iter().chain([&OUTSIDE]);
    kept.into_iter()
        .try_for_each(|run| host.holds(*run, FILLED))
}

fn follow(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, "", true)?;
    let (mut driver, pages) = host.driver(Settings::default())?;
    let before = host.blocks()?;
    ensure!(before >= POOL.len + OUTSIDE.len, "{before} bytes at first");
    host.want(12 * MIB)?;
    ensure!(driver.follow()? == Progress::Reached, "starved");
    let taken = Span::new(POOL.start, 12 * MIB);
    let behind = Span::new(taken.start + taken.len, 2 * MIB);
    // Before anything is read: that gives memory to holes of a shared file.
    let after = host.blocks()?;
    let gone = before.saturating_sub(after);
    ensure!(gone == 12 * MIB, "{gone} bytes discarded");
    agree(&host, &driver, &[taken], &[behind])?;

    host.want(5 * MIB)?;
    ensure!(driver.follow()? == Progress::Reached, "starved");
    ensure!(pages.free() == POOL.len - 5 * MIB, "not all came back");
    // The lowest come back first, and can be used.
    let back = Span::new(POOL.start, 7 * MIB);
    host.machine.memset(back.start, back.len, FILLED)?;
    let held = Span::new(back.start + back.len, 5 * MIB);
    agree(&host, &driver, &[held], &[back, behind])?;
    driver.remove()?;
    ensure!(pages.free() == POOL.len, "not all came back");
    Ok(format!("{} MiB discarded", gone / MIB))
}

fn messages(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, "", true)?;
    let mut found = Vec::new();
    for pfns in [1, 256, 4096] {
        host.machine.memset(POOL.start, POOL.len, FILLED)?;
        let settings = Settings {
            pfns,
            ..Settings::default()
        };
        let (mut driver, pages) = host.driver(settings)?;
        // 2 MiB in every second page, and a block behind them.
        pages.scatter(4 * MIB);
        // The driver's own memory is there by now.
        let before = host.blocks()?;
        let begun = Instant::now();
        driver.inflate(4 * MIB)?;
        let took = begun.elapsed().as_secs_f64() * 1e3;
        let notified = driver.transport().notified;
        let gone = before.saturating_sub(host.blocks()?);
        ensure!(gone == 4 * MIB, "{gone} bytes discarded");
        for page in (POOL.start..POOL.start + 4 * MIB).step_by(8192).take(8) {
            host.holds(Span::new(page, 4096), 0)?;
            host.holds(Span::new(page + 4096, 4096), FILLED)?;
        }
        let block = Span::new(POOL.start + 4 * MIB, 2 * MIB);
        agree(&host, &driver, &[block], &[])?;
        driver.remove()?;
        found.push(format!(
            "{notified} notifications, {took:.0} ms with {pfns}"
        ));
    }
    Ok(found.join("; "))
}

fn life(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, ",deflate-on-oom=on", true)?;
    let (mut driver, pages) = host.driver(Settings::default())?;
    driver.inflate(4 * MIB)?;
    ensure!(driver.out_of_memory()? == MIB, "no step of 256 pages");
    let held = Span::new(POOL.start + MIB, 3 * MIB);
    let back = Span::new(POOL.start, MIB);
    host.machine.memset(back.start, back.len, FILLED)?;
    agree(&host, &driver, &[held], &[back])?;

    // The last page of the balloon changes places with the first of the pool.
    let (old, new) = (held.start + held.len - 4096, POOL.start);
    let took = virtio_balloon::driver::GuestPages::take(&mut pages.clone(), 4096);
    ensure!(took == Some(new), "{took:x?}");
    driver.migrate(old, new)?;
    virtio_balloon::driver::GuestPages::give_back(&mut pages.clone(), Span::new(old, 4096));
    host.machine.memset(old, 4096, FILLED)?;
    let held = [Span::new(new, 4096), Span::new(held.start, held.len - 4096)];
    let kept = [Span::new(new + 4096, MIB - 4096), Span::new(old, 4096)];
    agree(&host, &driver, &held, &kept)?;
    driver.remove()?;
    ensure!(pages.free() == POOL.len, "not all came back");
    Ok("a step of 256 pages, a page migrated".into())
}

fn stats(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, "", true)?;
    let (mut driver, pages) = host.driver(Settings::default())?;
    driver.inflate(16 * MIB)?;
    let path = "/machine/peripheral/balloon";
    let set = json!({"path": path, "property": "guest-stats-polling-interval", "value": 1});
    host.ask("qom-set", set)?;
    let get = json!({"path": path, "property": "guest-stats"});
    let begun = Instant::now();
    loop {
        driver.answer_stats()?;
        let found = host.ask("qom-get", get.clone())?;
        let stats = &found["stats"];
        if stats["stat-free-memory"].as_u64() == Some(pages.free()) {
            let total = stats["stat-total-memory"].as_u64();
            ensure!(total == Some(MEMORY), "{found}");
            ensure!(stats["stat-swap-in"].as_u64() == Some(u64::MAX), "{found}");
            return Ok(format!("free memory {} MiB", pages.free() / MIB));
        }
        ensure!(begun.elapsed().as_secs() < 20, "it says {found}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn reporting(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, ",free-page-reporting=on", true)?;
    let (mut driver, _) = host.driver(Settings::default())?;
    // Hinting is not there, so the queue is not the standard's number 4.
    let number = Queue::Reporting.number(driver.features(), Numbering::Compressed);
    ensure!(number == Some(3), "reporting_vq is {number:?}");
    let before = host.blocks()?;
    let blocks: Vec<_> = (0..40)
        .map(|nr| Span::new(POOL.start + nr * 4 * MIB, 2 * MIB))
        .collect();
    let messages = driver.report(&blocks)?;
    let gone = before.saturating_sub(host.blocks()?);
    ensure!(gone == 80 * MIB, "{gone} bytes discarded");
    for block in blocks.iter().take(4) {
        host.holds(*block, 0)?;
        host.holds(Span::new(block.start + block.len, block.len), FILLED)?;
    }
    agree(&host, &driver, &[], &[])?;
    driver.remove()?;
    // By the standard's number there is no such queue.
    let settings = Settings {
        numbering: Numbering::Specification,
        ..Settings::default()
    };
    let found = host.driver(settings).err();
    let named = found.and_then(|error| error.downcast::<Error<qtest::virtio::Error>>().ok());
    match named {
        Some(Error::NoQueue {
            queue: Queue::Reporting,
            number: 4,
            size: 0,
        }) => Ok(format!("{} MiB in {messages} messages", gone / MIB)),
        other => Err(anyhow!("queue 4: {other:?}")),
    }
}

fn poison(program: &str) -> anyhow::Result<String> {
    let host = Host::start(program, ",free-page-reporting=on", true)?;
    let settings = Settings {
        poison: Some(0x5a5a_5a5a),
        ..Settings::default()
    };
    let (mut driver, _) = host.driver(settings)?;
    ensure!(driver.features().contains(Features::PAGE_POISON), "refused");
    let mut told = [0; 4];
    driver.transport().read_config(12, &mut told)?;
    ensure!(told == [0x5a; 4], "poison_val is {told:x?}");
    let before = host.blocks()?;
    let block = Span::new(POOL.start, 2 * MIB);
    driver.report(&[block])?;
    // They hold the poison value as before (5.5.6.7.2), since QEMU leaves them alone.
    host.holds(block, FILLED)?;
    ensure!(host.blocks()? == before, "something was discarded");
    driver.remove()?;
    Ok("kept".into())
}

fn hinting(program: &str) -> anyhow::Result<String> {
    let options = ",free-page-hint=on,iothread=thread";
    let host = Host::start(program, options, false)?;
    let (mut driver, pages) = host.driver(Settings::default())?;
    ensure!(driver.hint()? == Hinting::Nothing, "nobody has asked");
    let before = driver.transport().generation()?;
    // Slow at first, so that hints come in time; then as fast as it can.
    host.ask("migrate-set-parameters", json!({"max-bandwidth": 1 << 20}))?;
    host.ask("migrate", json!({"uri": "exec:cat >/dev/null"}))?;
    let begun = Instant::now();
    let hinted = loop {
        // Not before QEMU has told of it: it shows the command a moment earlier.
        if driver.transport().generation()? != before
            && let Hinting::Hinted { bytes, .. } = driver.hint()?
        {
            break bytes;
        }
        ensure!(begun.elapsed().as_secs() < 20, "no command");
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    ensure!(hinted == POOL.len && pages.free() == 0, "{hinted} bytes");
    host.ask(
        "migrate-set-parameters",
        json!({"max-bandwidth": 1u64 << 40}),
    )?;
    let done = |value: &serde_json::Value| value["status"] == "completed";
    let end = host
        .qmp
        .borrow_mut()
        .until("query-migrate", &json!({}), done)?;
    let begun = Instant::now();
    while !matches!(driver.hint()?, Hinting::Done { bytes } if bytes == hinted) {
        ensure!(begun.elapsed().as_secs() < 20, "hinting does not end");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    ensure!(pages.free() == POOL.len, "not all came back");
    let sent = end["ram"]["normal-bytes"].as_u64().unwrap_or(u64::MAX);
    // All that is no pool is 64 MiB; what was sent before the hints came is little.
    ensure!(sent < 80 * MIB, "{sent} bytes sent");
    driver.remove()?;
    Ok(format!(
        "{} MiB hinted, {} MiB sent",
        hinted / MIB,
        sent / MIB
    ))
}
