package fakeserver

import (
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
)

// writeCertificates writes the certificates of the authority and of every caller of the scenario.
// It returns the server's certificate, which it does not write.
func writeCertificates(dir string, authority *fakeagent.Authority, s *scenario.Scenario, names []string) (tls.Certificate, error) {
	certificate, key, err := authority.IssueServer(names...)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("the server's certificate: %w", err)
	}
	for folder, id := range s.Callers() {
		certificate, key, err := authority.IssueClient(id)
		if err != nil {
			return tls.Certificate{}, err
		}
		if err := writePair(filepath.Join(dir, filepath.FromSlash(folder)), certificate, key); err != nil {
			return tls.Certificate{}, err
		}
	}
	// ca.crt is written last: once it exists, so do the others.
	return pair, replace(filepath.Join(dir, "ca.crt"), authority.PEM(), 0o644)
}

func writePair(dir string, certificate, key []byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // The private keys in it have their own mode.
		return err
	}
	if err := replace(filepath.Join(dir, "tls.key"), key, 0o600); err != nil {
		return err
	}
	return replace(filepath.Join(dir, "tls.crt"), certificate, 0o644)
}

// replace writes a file atomically, so that readers never see a partial file.
func replace(path string, content []byte, mode os.FileMode) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }() // It no longer exists after the rename.
	if _, err := file.Write(content); err != nil {
		_ = file.Close() // The error of the write is returned.
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := os.Chmod(file.Name(), mode); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
