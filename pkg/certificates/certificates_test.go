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
