//! What a figure was measured on.

use serde::Serialize;

/// Facts about this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's own name.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// `linux`, `macos`.
    pub os: String,
    /// `x86_64`, `aarch64`.
    pub arch: String,
    /// Physical memory.
    pub memory_bytes: Option<u64>,
    /// kvbaton's version.
    pub kvbaton: String,
}

impl Machine {
    /// This machine.
    pub fn here() -> Machine {
        let (cpu, memory_bytes) = facts();
        Machine {
            cpu: cpu.unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            memory_bytes,
            kvbaton: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Bytes of this process that are in memory now, where the system says.
pub fn resident_bytes() -> Option<u64> {
    resident_kibibytes().map(|k| k * 1024)
}

#[cfg(target_os = "macos")]
fn resident_kibibytes() -> Option<u64> {
    let process = std::process::id().to_string();
    let output = std::process::Command::new("/bin/ps").args(["-o", "rss=", "-p", &process]).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

#[cfg(not(target_os = "macos"))]
fn resident_kibibytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(target_os = "macos")]
fn facts() -> (Option<String>, Option<u64>) {
    let sysctl = |key: &str| {
        let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", key]).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    (sysctl("machdep.cpu.brand_string"), sysctl("hw.memsize").and_then(|m| m.parse().ok()))
}

#[cfg(not(target_os = "macos"))]
fn facts() -> (Option<String>, Option<u64>) {
    let value = |file: &str, key: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kibibytes = value("/proc/meminfo", "MemTotal").and_then(|m| m.split(' ').next()?.parse::<u64>().ok());
    (value("/proc/cpuinfo", "model name"), kibibytes.map(|k| k * 1024))
}
