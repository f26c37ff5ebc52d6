package certificates_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

func TestFilesThatCannotBeUsedAreNamedAndNotQuoted(t *testing.T) {
	folder := t.TempDir()
	const secret = "do-not-tell"
	named := func(name, content string) string {
		file := filepath.Join(folder, name)
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		return file
	}
	for _, content := range []string{
		secret,
		"-----BEGIN PRIVATE KEY-----\nZG8tbm90LXRlbGw=\n-----END PRIVATE KEY-----\n",
		"-----BEGIN CERTIFICATE-----\nZG8tbm90LXRlbGw=\n-----END CERTIFICATE-----\n",
	} {
		f := certificates.Follow(certificates.Files{
			CertFile: named("tls.crt", content), KeyFile: named("tls.key", content), CAFile: named("ca.crt", content), Refresh: time.Hour,
		})
		_, err := f.Certificate()
		require.ErrorContains(t, err, filepath.Join(folder, "tls.key"))
		require.NotContains(t, err.Error(), secret)
		require.NotContains(t, err.Error(), "ZG8tbm90LXRlbGw")
		_, err = f.Authorities()
		require.ErrorContains(t, err, filepath.Join(folder, "ca.crt"))
		require.NotContains(t, err.Error(), secret)
		require.NotContains(t, err.Error(), "ZG8tbm90LXRlbGw")
		require.Positive(t, f.Stats().CertificateErrors)
		require.Positive(t, f.Stats().AuthoritiesErrors)
		require.Zero(t, f.Stats().CertificateNotAfter)
		f.Close()
		f.Close()
	}
}

// Users compare the pools, to look again at what they have verified only when they differ.
func TestThePoolIsTheSameUntilTheAuthoritiesChange(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "ca.crt")
	first, second := issued(t, 1, time.Now().Add(time.Hour)), issued(t, 2, time.Now().Add(time.Hour))
	require.NoError(t, os.WriteFile(file, first.Authorities, 0o600))
	f := certificates.Follow(certificates.Files{CertFile: file, KeyFile: file, CAFile: file, Refresh: time.Hour})
	defer f.Close()
	pool, err := f.Authorities()
	require.NoError(t, err)
	for _, content := range [][]byte{first.Authorities, append(first.Authorities, first.Authorities...), nil} {
		require.NoError(t, os.WriteFile(file, content, 0o600))
		f.Read()
		again, err := f.Authorities()
		require.NoError(t, err)
		require.Same(t, pool, again)
	}
	require.NoError(t, os.WriteFile(file, second.Authorities, 0o600))
	f.Read()
	changed, err := f.Authorities()
	require.NoError(t, err)
	require.NotSame(t, pool, changed)
}
