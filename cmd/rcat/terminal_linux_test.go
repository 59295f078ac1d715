package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// openTerminal returns a terminal, and what is on its other side: the keyboard and
// the screen.
func openTerminal(t *testing.T) (terminal, user *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("needs pseudo-terminals: %v", err)
	}
	t.Cleanup(func() { user.Close() })
	raw, err := user.SyscallConn()
	require.NoError(t, err)
	var n int
	require.NoError(t, raw.Control(func(fd uintptr) { // Fd would make reads that Close can't end
		err = errors.Join(
			unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0),
			unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}))
		if err == nil {
			n, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}))
	require.NoError(t, err)
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { terminal.Close() })
	return terminal, user
}

func TestFileArrivesAndBothSidesEndAtTerminals(t *testing.T) {
	t.Parallel()
	for _, dialerSends := range []bool{true, false} {
		terminal, _ := openTerminal(t)
		file, sum := randomFile(t, 1<<20)
		copied := newCopy(t)
		var l, d *process
		if dialerSends {
			l = start(t, terminal, to(copied), "-lv", "--reply-wait", "1h", "127.0.0.1", "0")
			d = dialer(t, l, file)
		} else {
			l = listener(t, file)
			d = start(t, terminal, to(copied), "--reply-wait", "1h", "127.0.0.1", l.port())
		}
		require.Equal(t, 0, d.status())
		require.Equal(t, 0, l.status())
		require.Equal(t, sum, sumOf(t, copied))
	}
}

func TestEmptyFileToAListenerAtATerminal(t *testing.T) {
	t.Parallel()
	terminal, _ := openTerminal(t)
	l := listener(t, terminal)
	d := dialer(t, l, nil)
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
}

// A listener whose stdin is /dev/null sends end-of-file at once, and a user at the
// dialer types all the same, until ^D.
func TestUserTypesToAListenerThatOnlyReceives(t *testing.T) {
	t.Parallel()
	terminal, user := openTerminal(t)
	l := listener(t, nil)
	d := dialer(t, l, terminal)
	l.says("connected from")
	require.Never(t, func() bool { return !d.running() }, 200*time.Millisecond, 20*time.Millisecond)
	for _, line := range []string{"hello\n", "bye\n", "\x04"} {
		_, err := io.WriteString(user, line)
		require.NoError(t, err)
		l.prints(strings.Trim(line, "\x04"))
	}
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
	require.Equal(t, "hello\nbye\n", l.out.String())
}

func TestUsersTalkUntilOneEnds(t *testing.T) {
	t.Parallel()
	terminalL, userL := openTerminal(t)
	terminalD, userD := openTerminal(t)
	l := listener(t, terminalL)
	d := dialer(t, l, terminalD)
	for _, line := range []string{"one\n", "two\n"} {
		_, err := io.WriteString(userL, line)
		require.NoError(t, err)
		d.prints(line)
		_, err = io.WriteString(userD, line)
		require.NoError(t, err)
		l.prints(line)
	}
	_, err := io.WriteString(userL, "\x04")
	require.NoError(t, err)
	require.Equal(t, 0, d.status())
	require.Equal(t, 0, l.status())
}

// rcat in the background does not touch the terminal until something is typed, and
// isn't stopped then.
func TestInTheBackground(t *testing.T) {
	t.Parallel()
	terminal, user := openTerminal(t)
	shell := start(t, terminal, func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		c.Path, c.Args = "/bin/sh", []string{"sh", "-mc", executable + " -lv 127.0.0.1 0 & wait $!; echo status $?"}
	})
	stdin, end := openPipe(t)
	d := dialer(t, shell, stdin)
	shell.says("connected from")
	_, err := io.WriteString(user, "typed\n")
	require.NoError(t, err)
	d.says("connected to")
	_, err = io.WriteString(end, "arrives")
	require.NoError(t, err)
	shell.prints("arrives")
	end.Close()
	shell.prints("status 0")
	require.Equal(t, 0, d.status())
	require.Empty(t, d.out.String())
}

func TestDemoShowsItsProgressOnATerminal(t *testing.T) {
	t.Parallel()
	terminal, user := openTerminal(t)
	screen := new(captured)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(screen, user)
	}()
	p := start(t, nil, func(c *exec.Cmd) { c.Stderr = terminal }, "--demo=8MiB")
	require.Equal(t, 0, p.status())
	require.Contains(t, p.out.String(), "SHA-256 matches")
	p.has(screen, "rcat --demo ")
	p.has(screen, "%")
	user.Close()
	<-done
}
