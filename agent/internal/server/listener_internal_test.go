package server

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A process that can write to the folder can replace the agent's socket with its own.
func TestTheFolderOfASocketIsNotWritableForEveryUser(t *testing.T) {
	for name, c := range map[string]struct {
		mode    fs.FileMode
		mounted bool
		says    string
	}{
		"for the agent's user":             {mode: 0o700},
		"for its group":                    {mode: 0o770},
		"for everyone":                     {mode: 0o777, says: "has the mode drwxrwxrwx, so every user could replace the socket"},
		"a shared folder such as /tmp":     {mode: 0o777 | fs.ModeSticky, says: "has the mode dtrwxrwxrwx"},
		"a shared folder of its own mount": {mode: 0o777 | fs.ModeSticky, mounted: true, says: "has the mode dtrwxrwxrwx"},
		"a pod's volume":                   {mode: 0o777 | fs.ModeSetgid, mounted: true},
	} {
		t.Run(name, func(t *testing.T) {
			folder, err := filepath.EvalSymlinks(t.TempDir())
			require.NoError(t, err)
			require.NoError(t, os.Chmod(folder, c.mode))
			mounts := "22 1 0:21 / / rw,relatime shared:1 - overlay root rw\n"
			if c.mounted {
				mounts += "36 22 98:0 /volumes/socket " + folder + " rw,noatime - ext4 /dev/root rw\n"
			}
			mountinfo := filepath.Join(t.TempDir(), "mountinfo")
			require.NoError(t, os.WriteFile(mountinfo, []byte(mounts), 0o600))
			err = protectedFolder(folder, mountinfo)
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.says)
		})
	}
	require.ErrorContains(t, protectedFolder(filepath.Join(t.TempDir(), "none"), "/nofile"), "the socket's folder")
}
