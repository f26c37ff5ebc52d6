//go:build !linux

package process

import (
	"errors"
	"net/netip"
)

// Listeners is known on Linux only.
func Listeners(int) ([]netip.AddrPort, error) { return nil, errors.ErrUnsupported }

// WithEnvironment is known on Linux only.
func WithEnvironment(string) ([]int, error) { return nil, errors.ErrUnsupported }
