//! The protocol against a peer that follows a script: what is sent, and what becomes of answers that
//! are late, broken or missing.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use qtest::{Error, Irq, Machine};

/// For answers that come.
const LONG: Duration = Duration::from_secs(600);
/// For those that do not.
const SHORT: Duration = Duration::from_millis(50);

/// A peer that expects these commands and gives these answers, and then hangs up. An answer holds its
/// own line ends.
fn peer(script: &'static [(&'static str, &'static str)]) -> (Machine, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let peer = thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        let say = |text: &str| (&theirs).write_all(text.as_bytes()).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "endianness");
        say("OK little\n");
        for (command, answer) in script {
            assert_eq!(lines.next().unwrap().unwrap(), *command);
            say(answer);
        }
    });
    (Machine::over(ours).unwrap(), peer)
}

#[test]
fn commands_are_written_as_the_protocol_has_them() {
    let (machine, peer) = peer(&[
        ("readb 0xfed90000", "OK 0x0000000000000010\n"),
        ("readq 0x1", "OK 0xffffffffffffffff\n"),
        ("writeb 0x1 0x2", "OK\n"),
        ("writeq 0xffffffffffffffff 0x8000000000000000", "OK\n"),
        ("inw 0xcfc", "OK 0x8086\n"),
        ("outl 0xcf8 0x80000000", "OK\n"),
        ("b64write 0x10 0x4 AQIDBA==", "OK\n"),
        ("b64read 0x10 0x4", "OK AQIDBA==\n"),
        ("memset 0x0 0x1000 0xff", "OK\n"),
        ("clock_step 100", "OK 100\n"),
        ("clock_step", "OK 1100\n"),
        ("clock_set 2000", "OK 2000\n"),
        ("irq_intercept_out /machine/unattached/device[3]", "OK\n"),
        ("set_irq_in ioapic unnamed-gpio-in 5 -1", "OK\n"),
    ]);
    assert_eq!(machine.readb(0xfed9_0000).unwrap(), 0x10);
    assert_eq!(machine.readq(1).unwrap(), u64::MAX);
    machine.writeb(1, 2).unwrap();
    machine.writeq(u64::MAX, 1 << 63).unwrap();
    assert_eq!(machine.inw(0xcfc).unwrap(), 0x8086);
    machine.outl(0xcf8, 0x8000_0000).unwrap();
    machine.write(0x10, &[1, 2, 3, 4]).unwrap();
    let mut bytes = [0; 4];
    machine.read(0x10, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    machine.memset(0, 4096, 0xff).unwrap();
    assert_eq!(machine.clock_step(100).unwrap(), 100);
    assert_eq!(machine.clock_step_to_next().unwrap(), 1100);
    assert_eq!(machine.clock_set(2000).unwrap(), 2000);
    machine
        .irq_intercept_out("/machine/unattached/device[3]")
        .unwrap();
    machine
        .set_irq_in("ioapic", "unnamed-gpio-in", 5, -1)
        .unwrap();
    peer.join().unwrap();
}

#[test]
fn interrupts_before_an_answer_and_behind_it_are_no_answers() {
    let (machine, peer) = peer(&[
        (
            "readb 0x0",
            "IRQ raise 16\nIRQ lower 16\nOK 0x01\nIRQ raise 17\n",
        ),
        ("readb 0x1", "OK 0x02\n"),
    ]);
    assert_eq!(machine.readb(0).unwrap(), 1);
    assert_eq!(machine.readb(1).unwrap(), 2);
    assert!(machine.irq_raised(17) && !machine.irq_raised(16));
    let heard: Vec<_> = (0..3).map(|_| machine.wait_irq(LONG).unwrap()).collect();
    let irq = |line, raised| Some(Irq { line, raised });
    assert_eq!(heard, [irq(16, true), irq(16, false), irq(17, true)]);
    peer.join().unwrap();
}

#[test]
fn an_interrupt_that_does_not_come_is_no_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let peer = thread::spawn(move || (&theirs).write_all(b"OK\n").map(|()| theirs).unwrap());
    let machine = Machine::over(ours).unwrap();
    let theirs = peer.join().unwrap();
    assert_eq!(machine.wait_irq(SHORT).unwrap(), None);
    // Half of one does not come either, until its other half does.
    (&theirs).write_all(b"IRQ rai").unwrap();
    assert_eq!(machine.wait_irq(SHORT).unwrap(), None);
    (&theirs).write_all(b"se 3\n").unwrap();
    let irq = Irq {
        line: 3,
        raised: true,
    };
    assert_eq!(machine.wait_irq(LONG).unwrap(), Some(irq));
    (&theirs).write_all(b"OK\n").unwrap();
    let answer = machine.wait_irq(LONG);
    assert!(matches!(answer, Err(Error::Garbled { .. })), "{answer:?}");
}

#[test]
fn a_refusal_leaves_the_machine_in_step() {
    let (machine, peer) = peer(&[
        ("clock_step 1", "FAIL Unknown command 'clock_step'\n"),
        ("b64write 0x0 0x1 AA==", "ERR invalid argument size\n"),
        ("clock_set 0", "FAIL Unknown command 'clock_set'\n"),
        ("clock_set 0", "FAIL 5000\n"),
        ("clock_set 0", "OK 0\n"),
    ]);
    match machine.clock_step(1) {
        Err(Error::Refused { command, answer }) => {
            assert_eq!(command, "clock_step 1");
            assert_eq!(answer, "Unknown command 'clock_step'");
        }
        other => panic!("{other:?}"),
    }
    let refused = machine.write(0, &[0]);
    assert!(matches!(refused, Err(Error::Refused { .. })));
    assert!(!machine.clock_is_ours().unwrap());
    assert!(machine.clock_is_ours().unwrap(), "it is later already");
    assert!(machine.clock_is_ours().unwrap());
    peer.join().unwrap();
}

/// Every answer that is none, and that afterwards nothing more is sent: the script ends there.
#[test]
fn broken_answers_are_named_and_nothing_is_sent_after_them() {
    for answer in ["YES\n", "\n", "OKAY 1\n", "IRQ raise 300\n", "\u{1f}\n"] {
        let script: &'static [_] = Box::leak(Box::new([("readb 0x0", answer)]));
        let (machine, peer) = peer(script);
        let error = machine.readb(0).unwrap_err();
        assert!(matches!(error, Error::Garbled { .. }), "{error}");
        let next = machine.readb(0).unwrap_err();
        assert!(matches!(next, Error::OutOfStep { .. }), "{next}");
        peer.join().unwrap();
    }
}

#[test]
fn answers_that_hold_no_fitting_value_are_named() {
    for answer in ["OK\n", "OK 0x100\n", "OK 256\n", "OK 0xg\n", "OK 1 2\n"] {
        let script: &'static [_] = Box::leak(Box::new([("readb 0x0", answer)]));
        let (machine, peer) = peer(script);
        let error = machine.readb(0).unwrap_err();
        assert!(matches!(error, Error::Garbled { .. }), "{error}");
        peer.join().unwrap();
    }
    for answer in ["OK\n", "OK AAA=\n", "OK AAAAAA==\n", "OK !!!!\n"] {
        let script: &'static [_] = Box::leak(Box::new([("b64read 0x0 0x3", answer)]));
        let (machine, peer) = peer(script);
        let error = machine.read(0, &mut [0; 3]).unwrap_err();
        assert!(matches!(error, Error::Garbled { .. }), "{error}");
        peer.join().unwrap();
    }
}

#[test]
fn an_answer_too_many_is_not_taken_for_the_next_one() {
    let (machine, peer) = peer(&[("readb 0x0", "OK 0x1\nOK 0x2\n")]);
    assert_eq!(machine.readb(0).unwrap(), 1);
    let error = machine.readb(0).unwrap_err();
    assert!(matches!(error, Error::Garbled { .. }), "{error}");
    peer.join().unwrap();
}

/// Calls with a peer that is there but does nothing.
fn silent(call: impl FnOnce(&Machine) -> Error) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(b"OK little\n").unwrap();
    let machine = Machine::over(ours).unwrap().with_patience(SHORT);
    let start = Instant::now();
    let error = call(&machine);
    assert!(start.elapsed() >= SHORT);
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    // The answer that comes now belongs to no command.
    (&theirs).write_all(b"OK 0x7\n").unwrap();
    let next = machine.readb(0).unwrap_err();
    assert!(matches!(next, Error::OutOfStep { .. }), "{next}");
}

#[test]
fn silence_is_a_time_out_and_a_late_answer_is_dropped() {
    silent(|machine| machine.readb(0).unwrap_err());
}

#[test]
fn a_peer_that_does_not_read_is_a_time_out() {
    // More than the sockets hold, in pieces none of which is answered.
    let long = format!("x{}", " ".repeat(16 << 20));
    silent(|machine| machine.command(&long).unwrap_err());
}

#[test]
fn chatter_does_not_prolong_the_wait() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(b"OK little\n").unwrap();
    let machine = Machine::over(ours).unwrap().with_patience(SHORT);
    let peer = thread::spawn(move || while (&theirs).write_all(b"IRQ raise 1\n").is_ok() {});
    let error = machine.readb(0).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    drop(machine);
    peer.join().unwrap();
}

#[test]
fn a_line_without_an_end_is_cut_off() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(b"OK little\n").unwrap();
    let machine = Machine::over(ours).unwrap();
    let peer = thread::spawn(move || while (&theirs).write_all(&[b'x'; 4096]).is_ok() {});
    let error = machine.readb(0).unwrap_err();
    assert!(matches!(&error, Error::Garbled { answer, .. } if answer.len() < 200));
    drop(machine);
    peer.join().unwrap();
}

#[test]
fn a_peer_that_hangs_up_has_died() {
    for half in ["", "OK 0x"] {
        let script: &'static [_] = Box::leak(Box::new([("readb 0x0", half)]));
        let (machine, peer) = peer(script);
        let error = machine.readb(0).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Died { status: None, .. }), "{text}");
        peer.join().unwrap();
    }
}
