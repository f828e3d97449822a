/* SPDX-License-Identifier: MIT
 *
 * Where libraries lie: first as the loader looks (LD_LIBRARY_PATH, ld.so.conf, its own folders), then in the toolkit, then beside PyTorch. The
 * library looks in this order when it opens NVRTC and cuBLAS. */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool here(struct doctor *d, const char *folder, const char *name, char path[PATH_MAX])
{
    return *folder == '/' && doctor_join(path, folder, name, NULL) && doctor_exists(d, path);
}

/* The next part of a list such as PATH; false at its end. */
static bool next_folder(const char **list, char folder[PATH_MAX])
{
    while (**list != '\0') {
        size_t n = strcspn(*list, ":");
        const char *part = *list;

        *list += n + (part[n] == ':');
        if (n == 0 || n >= PATH_MAX)
            continue;
        memcpy(folder, part, n);
        folder[n] = '\0';
        return true;
    }
    return false;
}

static bool in_list(struct doctor *d, const char *list, const char *name, char path[PATH_MAX])
{
    char folder[PATH_MAX];

    while (list != NULL && next_folder(&list, folder))
        if (here(d, folder, name, path))
            return true;
    return false;
}

/* ---------------------------------------------------------------- the loader */

/* A file of ld.so.conf: a folder a line. Its include lines name ld.so.conf.d, which the caller reads. */
static bool in_conf(struct doctor *d, const char *conf, const char *name, char path[PATH_MAX])
{
    const char *text = doctor_text(d, conf);

    while (text != NULL && *text != '\0') {
        char folder[PATH_MAX];
        size_t n = strcspn(text, " \t\r\n#,:");

        if (*text == '/' && n < sizeof(folder)) {
            memcpy(folder, text, n);
            folder[n] = '\0';
            if (here(d, folder, name, path))
                return true;
        }
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    return false;
}

static bool in_confs(struct doctor *d, const char *name, char path[PATH_MAX])
{
    struct doctor_names confs = doctor_list(d, "/etc/ld.so.conf.d", "");
    char conf[PATH_MAX];
    bool there = false;

    for (size_t i = 0; i < confs.count && !there; i++) {
        size_t n = strlen(confs.name[i]);

        there = n > 5 && strcmp(confs.name[i] + n - 5, ".conf") == 0 &&
                doctor_join(conf, "/etc/ld.so.conf.d", confs.name[i], NULL) && in_conf(d, conf, name, path);
    }
    doctor_names_free(&confs);
    return there || in_conf(d, "/etc/ld.so.conf", name, path);
}

bool doctor_find_loader(struct doctor *d, const char *name, char path[PATH_MAX])
{
    static const char *const folders[] = {
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/lib",
        "/usr/lib",
    };

    if (in_list(d, doctor_env(d, "LD_LIBRARY_PATH"), name, path) || in_confs(d, name, path))
        return true;
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++)
        if (here(d, folders[i], name, path))
            return true;
    return false;
}

/* ---------------------------------------------------------------- the toolkit */

static bool toolkit_of_nvcc(struct doctor *d, char folder[PATH_MAX])
{
    char nvcc[PATH_MAX], *end;

    if (!in_list(d, doctor_env(d, "PATH"), "nvcc", nvcc) || !doctor_path_inside(d, nvcc, folder))
        return false;
    for (int up = 0; up < 2; up++)
        if ((end = strrchr(folder, '/')) != NULL)
            *end = '\0';
    return *folder == '/';
}

size_t doctor_toolkits(struct doctor *d, bool of_nvcc, char (*folders)[PATH_MAX])
{
    const char *named[] = {doctor_env(d, "CUDA_HOME"), doctor_env(d, "CUDA_PATH")};
    size_t count = 0;

    for (size_t i = 0; i < 2; i++)
        if (named[i] != NULL && *named[i] == '/' && strlen(named[i]) < PATH_MAX)
            strcpy(folders[count++], named[i]);
    if (of_nvcc && toolkit_of_nvcc(d, folders[count]))
        count++;
    strcpy(folders[count++], "/usr/local/cuda");
    return count;
}

bool doctor_find_toolkit(struct doctor *d, const char *name, char path[PATH_MAX])
{
    static const char *const below[] = {"lib64", "lib", "targets/x86_64-linux/lib", "extras/CUPTI/lib64"};
    char(*folders)[PATH_MAX] = malloc(DOCTOR_TOOLKITS * sizeof(*folders)), folder[PATH_MAX];
    size_t count = folders != NULL ? doctor_toolkits(d, false, folders) : 0;
    bool there = false;

    for (size_t f = 0; f < count && !there; f++)
        for (size_t i = 0; i < sizeof(below) / sizeof(below[0]) && !there; i++)
            there = doctor_join(folder, folders[f], below[i], NULL) && here(d, folder, name, path);
    free(folders);
    return there;
}

/* ---------------------------------------------------------------- Python */

/* What is looked for in one site folder. */
typedef bool in_site(struct doctor *d, const char *site, const char *name, char path[PATH_MAX]);

static bool wheel_in_site(struct doctor *d, const char *site, const char *name, char path[PATH_MAX])
{
    char nvidia[PATH_MAX], folder[PATH_MAX];
    struct doctor_names packages = {NULL, 0};
    bool there = false;

    if (doctor_join(nvidia, site, "nvidia", NULL))
        packages = doctor_list(d, nvidia, "");
    for (size_t i = 0; i < packages.count && !there; i++)
        there = doctor_join(folder, nvidia, packages.name[i], "lib", NULL) && here(d, folder, name, path);
    doctor_names_free(&packages);
    return there;
}

static bool in_prefix(struct doctor *d, const char *prefix, in_site *look, const char *name, char path[PATH_MAX])
{
    static const char *const kinds[] = {"site-packages", "dist-packages"};
    struct doctor_names pythons = {NULL, 0};
    char lib[PATH_MAX], site[PATH_MAX];
    bool there = false;

    if (prefix == NULL || *prefix != '/')
        return false;
    if (doctor_join(lib, prefix, "lib", NULL))
        pythons = doctor_list(d, lib, "python3");
    for (size_t k = 0; k < 2 && !there; k++)
        for (size_t i = 0; i < pythons.count && !there; i++)
            there = doctor_join(site, lib, pythons.name[i], kinds[k], NULL) && look(d, site, name, path);
    doctor_names_free(&pythons);
    return there;
}

static bool in_prefixes(struct doctor *d, in_site *look, const char *name, char path[PATH_MAX])
{
    static const char *const prefixes[] = {"/usr/local", "/usr", "/opt/conda"};
    const char *home = doctor_env(d, "HOME");
    char local[PATH_MAX];

    if (in_prefix(d, doctor_env(d, "VIRTUAL_ENV"), look, name, path) ||
        in_prefix(d, doctor_env(d, "CONDA_PREFIX"), look, name, path))
        return true;
    if (home != NULL && doctor_join(local, home, ".local", NULL) && in_prefix(d, local, look, name, path))
        return true;
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
        if (in_prefix(d, prefixes[i], look, name, path))
            return true;
    return false;
}

bool doctor_find_wheel(struct doctor *d, const char *name, char path[PATH_MAX])
{
    return in_prefixes(d, wheel_in_site, name, path);
}

static bool file_in_site(struct doctor *d, const char *site, const char *name, char path[PATH_MAX])
{
    return here(d, site, name, path);
}

/* The prefix of the first python3 in PATH is the folder above its own; a virtual environment's is a link, so links are not followed. */
static bool in_path_python(struct doctor *d, const char *name, char path[PATH_MAX])
{
    char python[PATH_MAX], *end;

    if (!in_list(d, doctor_env(d, "PATH"), "python3", python))
        return false;
    for (int up = 0; up < 2; up++)
        if ((end = strrchr(python, '/')) != NULL)
            *end = '\0';
    return in_prefix(d, *python != '\0' ? python : "/", file_in_site, name, path);
}

bool doctor_find_site(struct doctor *d, const char *name, char path[PATH_MAX])
{
    return in_list(d, doctor_env(d, "PYTHONPATH"), name, path) || in_path_python(d, name, path) ||
           in_prefixes(d, file_in_site, name, path);
}
