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
    /// The system's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os_version: Option<String>,
    /// Cores of the GPU; of a Mac alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_cores: Option<u32>,
    /// `automatic`, `low` or `high`; of a Mac alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_mode: Option<String>,
    /// Per cent to which heat limits the processor's speed; of a Mac alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_limit_percent: Option<u32>,
    /// kvbaton's version.
    pub kvbaton: String,
}

impl Machine {
    /// This machine.
    pub fn here() -> Machine {
        let Facts { cpu, memory_bytes, os_version, gpu_cores, power_mode, speed_limit_percent } = facts();
        Machine {
            cpu: cpu.unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            memory_bytes,
            os_version,
            gpu_cores,
            power_mode,
            speed_limit_percent,
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

/// What the system says of itself.
#[derive(Default)]
struct Facts {
    cpu: Option<String>,
    memory_bytes: Option<u64>,
    os_version: Option<String>,
    gpu_cores: Option<u32>,
    power_mode: Option<String>,
    speed_limit_percent: Option<u32>,
}

#[cfg(target_os = "macos")]
fn facts() -> Facts {
    let ask = |program: &str, arguments: &[&str]| {
        let output = std::process::Command::new(program).args(arguments).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let sysctl = |key: &str| ask("/usr/sbin/sysctl", &["-n", key]);
    let gpu = ask("/usr/sbin/ioreg", &["-l", "-r", "-c", "AGXAccelerator", "-d", "1"]).unwrap_or_default();
    let power = ask("/usr/bin/pmset", &["-g"]).unwrap_or_default();
    let heat = ask("/usr/bin/pmset", &["-g", "therm"]).unwrap_or_default();
    let mode = field(&power, "powermode").or_else(|| field(&power, "lowpowermode"));
    Facts {
        cpu: sysctl("machdep.cpu.brand_string"),
        memory_bytes: sysctl("hw.memsize").and_then(|m| m.parse().ok()),
        os_version: ask("/usr/bin/sw_vers", &["-productVersion"]),
        gpu_cores: field(&gpu, "\"gpu-core-count\"").and_then(|n| n.parse().ok()),
        power_mode: mode.map(|n| power_mode(&n).to_owned()),
        speed_limit_percent: field(&heat, "CPU_Speed_Limit").and_then(|n| n.parse().ok()),
    }
}

/// What `pmset` means by a number.
#[cfg(any(test, target_os = "macos"))]
fn power_mode(number: &str) -> &'static str {
    match number {
        "1" => "low",
        "2" => "high",
        _ => "automatic",
    }
}

/// The value of `key` in lines of `key value`, `key = value` or `key: value`.
#[cfg(any(test, target_os = "macos"))]
fn field(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let at = line.find(key)?;
        let before = line[..at].chars().next_back();
        let rest = &line[at + key.len()..];
        let whole = before.is_none_or(|c| !c.is_alphanumeric()) && !rest.starts_with(char::is_alphanumeric);
        let value = rest.trim_start_matches([' ', '\t', '=', ':']).split_whitespace().next()?;
        whole.then(|| value.to_owned())
    })
}

#[cfg(not(target_os = "macos"))]
fn facts() -> Facts {
    let value = |file: &str, key: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kibibytes = value("/proc/meminfo", "MemTotal").and_then(|m| m.split(' ').next()?.parse::<u64>().ok());
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    Facts {
        cpu: value("/proc/cpuinfo", "model name"),
        memory_bytes: kibibytes.map(|k| k * 1024),
        os_version: kernel.map(|k| k.trim().to_owned()),
        ..Facts::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_name() {
        let here = Machine::here();
        assert!(here.cores > 0 && !here.cpu.is_empty());
    }

    #[test]
    fn values_are_found_by_whole_keys() {
        let power = "System-wide power settings:\n lowpowermode         0\n powermode            2\n";
        assert_eq!(field(power, "powermode").as_deref(), Some("2"));
        assert_eq!(field(power, "lowpowermode").as_deref(), Some("0"));
        let gpu = "    | |   \"gpu-core-count\" = 20\n";
        assert_eq!(field(gpu, "\"gpu-core-count\"").as_deref(), Some("20"));
        let heat = "Note: No thermal warning level has been recorded\n\tCPU_Speed_Limit \t= 100\n";
        assert_eq!(field(heat, "CPU_Speed_Limit").as_deref(), Some("100"));
        assert_eq!(field("", "powermode"), None);
        assert_eq!((power_mode("0"), power_mode("1"), power_mode("2")), ("automatic", "low", "high"));
    }
}
